"""tokens.parquet to plan.parquet: which rows share which prefix, cut into partitions for the workers."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from prefect import task

from engine.plan import PlanMethod, PlanTable, SharingStats, plan_token_table
from tasks.artifact import ArtifactRef, open_parquet, write_parquet
from tasks.artifact_cache import CACHED_ARTIFACT, build_once, cache_target

PLAN_SCHEMA = pa.schema(
    [
        pa.field("row_id", pa.int64(), nullable=False),
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("member_id", pa.int64(), nullable=False),
        pa.field("num_prefix_tokens", pa.int32(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
    ]
)
"""One row a row without error, by partition, group, member, row. The schema's metadata holds the `PlanSummary`."""

BATCH_ROWS = 65_536
_SUMMARY_KEY = b"batchloom.plan_summary"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """A plan in numbers.

    Attributes:
        num_rows: planned; rows with an error are not.
        num_partitions: numbered from 0, none empty.
        sharing: prompt tokens without and with the plan's prefixes.
    """

    num_rows: int
    num_groups: int
    num_partitions: int
    sharing: SharingStats


@task(name="plan_prefix", retries=0, cache_policy=CACHED_ARTIFACT, persist_result=True, result_serializer="json")
def plan_prefix(
    tokens: ArtifactRef, target: str, method: PlanMethod, partition_tokens: int, num_answer_tokens: int
) -> ArtifactRef:
    """Write `target`: the plan of all prompts in `tokens`.

    Args:
        partition_tokens: of work in one partition, about.
        num_answer_tokens: expected of each distinct prompt; they count as work.
    Raises:
        ArtifactError: the tokens are not what their reference says, or `target` cannot be written.
    """
    with open_parquet(tokens) as file:
        row_ids, values, offsets = read_token_table(file)
    table = plan_token_table(values, offsets, method=method)
    partitions = cut_partitions(table, np.diff(offsets), partition_tokens, num_answer_tokens)
    summary = PlanSummary(
        num_rows=len(row_ids),
        num_groups=table.num_groups,
        num_partitions=int(partitions.max()) + 1 if len(partitions) else 0,
        sharing=table.sharing,
    )
    schema = PLAN_SCHEMA.with_metadata({_SUMMARY_KEY: json.dumps(asdict(summary))})
    return write_parquet(target, schema, _plan_batches(schema, row_ids, table, partitions))


def plan_prefix_once(
    database: str | Path, tokens: ArtifactRef, method: PlanMethod, partition_tokens: int, num_answer_tokens: int
) -> ArtifactRef:
    """`plan_prefix`, unless the same tokens were planned before with the same settings."""
    content = (tokens.digest, method, partition_tokens, num_answer_tokens)
    target = cache_target(database, "plan", *content, code=(__name__, "engine.plan", "engine.prefix_tree"))
    return build_once(
        plan_prefix,
        target,
        tokens=tokens,
        method=method,
        partition_tokens=partition_tokens,
        num_answer_tokens=num_answer_tokens,
    )


def read_plan_summary(plan: ArtifactRef) -> PlanSummary:
    """The numbers of a plan; `ArtifactError` where the file is not what its reference says."""
    with open_parquet(plan) as file:
        values = json.loads(file.schema_arrow.metadata[_SUMMARY_KEY])
    return PlanSummary(**{**values, "sharing": SharingStats(**values["sharing"])})


def cut_partitions(
    table: PlanTable, num_prompt_tokens: npt.NDArray[np.int64], partition_tokens: int, num_answer_tokens: int
) -> npt.NDArray[np.int32]:
    """The partition of each row: consecutive groups, in prefix tree order, with about `partition_tokens` of work.

    Work is what the model computes: a prefix once, each distinct prompt's suffix once, and its answer. A group is never
    split, so a partition may be larger by its last group.

    Args:
        num_prompt_tokens: int64 ``[num_rows]``.
    Returns:
        int32 ``[num_rows]``, 0 .. partitions - 1 without a gap.
    """
    order = np.lexsort((table.member_id, table.group_id))
    groups, members = table.group_id[order], table.member_id[order]
    starts_group = np.diff(groups, prepend=-1) != 0
    starts_member = starts_group | (np.diff(members, prepend=-1) != 0)
    prefix_tokens = table.num_prefix_tokens[order].astype(np.int64)
    work = np.where(starts_member, num_prompt_tokens[order] - prefix_tokens + num_answer_tokens, 0)
    work += np.where(starts_group, prefix_tokens, 0)
    group_work = np.bincount(groups, weights=work, minlength=table.num_groups).astype(np.int64)
    window = (np.cumsum(group_work) - group_work) // partition_tokens
    partitions = np.unique(window, return_inverse=True)[1].astype(np.int32)
    return partitions[table.group_id] if len(partitions) else np.empty(0, dtype=np.int32)


def read_token_table(
    file: pq.ParquetFile,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Rows without error: row ids ``[n]``, their tokens end to end, offsets ``[n + 1]``."""
    row_ids, values, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int32)], [np.empty(0, np.int64)]
    for batch in file.iter_batches(batch_size=BATCH_ROWS):
        batch = batch.filter(pc.is_null(batch.column("error")))
        token_ids = batch.column("token_ids")
        row_ids.append(batch.column("row_id").to_numpy())
        values.append(token_ids.flatten().to_numpy())
        lengths.append(pc.list_value_length(token_ids).to_numpy().astype(np.int64))
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    return np.concatenate(row_ids), np.concatenate(values), offsets


def _plan_batches(
    schema: pa.Schema, row_ids: npt.NDArray[np.int64], table: PlanTable, partitions: npt.NDArray[np.int32]
) -> Iterator[pa.RecordBatch]:
    order = np.lexsort((row_ids, table.member_id, table.group_id, partitions))
    columns = (row_ids, table.group_id, table.member_id, table.num_prefix_tokens, partitions)
    for start in range(0, len(order), BATCH_ROWS):
        rows = order[start : start + BATCH_ROWS]
        yield pa.RecordBatch.from_arrays([pa.array(column[rows]) for column in columns], schema=schema)
