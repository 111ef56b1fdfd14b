"""Reads and writes plan.parquet: the rows of a `Plan`, whole or by partition, and its summary."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from engine.errors import ArtifactError
from engine.planning.plan import COLUMNS, Plan, SharingStats
from tasks.storage.artifact import ArtifactRef, open_parquet
from tasks.storage.schemas import NUMBERS, PLAN_SCHEMA

PLAN_BATCH_ROWS = 4096
PLAN_BATCH_TOKENS = 1_000_000

_SUMMARY_KEY = b"batchloom.plan_summary"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """A plan in numbers.

    Attributes:
        num_rows: planned rows; rows with an error are not planned.
        num_partitions: partitions, numbered from 0 by priority, none empty.
        partition_costs: predicted cost of each partition; see `engine.planning.plan_partitions`.
        partition_rows, partition_priorities: number of rows of each partition, and the highest priority among them.
        dispatch_order: partitions in the order in which workers take them, so that all workers finish together.
        sharing: prompt tokens without and with the plan's prefixes.
    """

    num_rows: int
    num_groups: int
    num_partitions: int
    partition_costs: tuple[int, ...]
    partition_rows: tuple[int, ...]
    partition_priorities: tuple[int, ...]
    dispatch_order: tuple[int, ...]
    sharing: SharingStats

    @property
    def text(self) -> str:
        """One line for people."""
        return (
            f"{self.sharing.num_logical_tokens:,} prompt tokens, {self.sharing.token_saving_ratio:.1%} of them shared, "
            f"groups: {self.num_groups:,}, partitions: {self.num_partitions:,}"
        )


def schema_with(summary: PlanSummary) -> pa.Schema:
    """`PLAN_SCHEMA` with the summary in its metadata."""
    return PLAN_SCHEMA.with_metadata({_SUMMARY_KEY: json.dumps(asdict(summary))})


def read_plan_summary(plan: ArtifactRef) -> PlanSummary:
    """The summary of a plan; `ArtifactError` where the file is not what its reference says."""
    with open_parquet(plan) as file:
        return TypeAdapter(PlanSummary).validate_json(file.schema_arrow.metadata[_SUMMARY_KEY])


def plan_batches(plan: Plan) -> Iterator[pa.RecordBatch]:
    """The plan as batches of `PLAN_SCHEMA`; `plan_of_rows` is the inverse."""
    skipped = np.where(plan.is_member_start, plan.num_prefix_tokens, plan.num_prompt_tokens)
    skipped[plan.group_starts] = 0
    own = [prompt[start:] for prompt, start in zip(plan.prompts, skipped.tolist(), strict=True)]
    for start, end in _batch_bounds(own):
        arrays = [pa.array(getattr(plan, name)[start:end]) for name in COLUMNS]
        yield pa.RecordBatch.from_arrays([*arrays, list_tokens(own[start:end])], schema=PLAN_SCHEMA)


def plan_of_rows(rows: pa.Table) -> Plan:
    """The plan of complete groups in the order of `PLAN_SCHEMA`. Prompts are whole again; equal ones share an array.
    Raises `ArtifactError` if the rows contradict each other; the message names the first such row."""
    plan = Plan(prompts=[], **{name: rows.column(name).to_numpy() for name in COLUMNS})
    first = first_of_member = 0
    prompts: list[npt.NDArray[np.int32]] = []
    own_tokens = [own for chunk in rows.column("token_ids").chunks for own in token_arrays(chunk)]
    columns = (own_tokens, plan.num_prefix_tokens.tolist(), plan.is_group_start, plan.is_member_start)
    for row, (own, prefix_len, is_group_start, is_member_start) in enumerate(zip(*columns, strict=True)):
        if is_group_start:
            first, prompt = row, own
        elif prefix_len != plan.num_prefix_tokens[first]:
            raise ArtifactError(f"plan rows {first} and {row}, group {plan.group_id[row]}: the prefixes differ")
        elif is_member_start:
            prompt = np.concatenate([prompts[first][:prefix_len], own])
        elif len(own):
            raise ArtifactError(
                f"plan rows {first_of_member} and {row}, group {plan.group_id[row]}, member {plan.member_id[row]}: "
                "the prompts differ"
            )
        if is_member_start:
            first_of_member = row
            if not 0 <= prefix_len < len(prompt):
                raise ArtifactError(
                    f"plan row {row}: num_prefix_tokens is {prefix_len}, expected 0 to {len(prompt) - 1}, "
                    f"because the prompt has {len(prompt)} tokens and the last one is never shared"
                )
        prompts.append(prompt)
    return replace(plan, prompts=prompts)


def token_arrays(lists: pa.ListArray) -> list[npt.NDArray[np.int32]]:
    """The values of each row, without a copy."""
    values, offsets = lists.values.to_numpy(), lists.offsets.to_pylist()
    return [values[start:end] for start, end in pairwise(offsets)]


def list_tokens(prompts: Sequence[npt.NDArray[np.int32]]) -> pa.ListArray:
    """A list column with one prompt in each row; `token_arrays` is the inverse."""
    offsets = np.cumsum([0, *map(len, prompts)])
    values = np.concatenate([np.empty(0, np.int32), *prompts])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values), NUMBERS)


def _batch_bounds(prompts: Sequence[npt.NDArray[np.int32]]) -> Iterator[tuple[int, int]]:
    """First row and end of each batch, of at most `PLAN_BATCH_ROWS` rows and about `PLAN_BATCH_TOKENS` tokens."""
    start = num_tokens = 0
    for row, prompt in enumerate(prompts):
        num_tokens += len(prompt)
        if num_tokens >= PLAN_BATCH_TOKENS or row + 1 - start == PLAN_BATCH_ROWS:
            yield start, row + 1
            start, num_tokens = row + 1, 0
    if start < len(prompts):
        yield start, len(prompts)


def read_partition(plan: ArtifactRef, partition: int) -> Plan:
    """The rows of one partition, which has row groups of its own. Raises `ArtifactError` if the plan is not what its
    reference says, or has no such partition. Its digest is checked again only if the file has changed."""
    try:
        stat = Path(plan.path).stat()
    except OSError as error:
        raise ArtifactError(f"{plan.path} cannot be read: {error}") from error
    metadata, partitions = _verify(plan, stat.st_size, stat.st_mtime_ns)
    row_groups = np.flatnonzero(partitions == partition).tolist()
    if not row_groups:
        raise ArtifactError(f"{plan.path} has no partition {partition}")
    with pq.ParquetFile(plan.path, metadata=metadata) as file:
        return plan_of_rows(file.read_row_groups(row_groups))


@lru_cache(maxsize=64)
def _verify(ref: ArtifactRef, size: int, mtime_ns: int) -> tuple[pq.FileMetaData, npt.NDArray[np.int64]]:
    """The file's metadata and the partition of each row group."""
    with open_parquet(ref) as file:
        metadata = file.metadata
        column = file.schema_arrow.get_field_index("partition")
    groups = [metadata.row_group(index).column(column) for index in range(metadata.num_row_groups)]
    return metadata, np.array([group.statistics.min for group in groups], dtype=np.int64)
