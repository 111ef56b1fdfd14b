"""The rows of one partition of plan.parquet."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from engine.errors import ArtifactError
from tasks.storage.artifact import ArtifactRef, open_parquet
from tasks.storage.plan_file import token_arrays


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partition:
    """Whole groups of a plan, by row id.

    Attributes:
        row_ids: int64 ``[num_rows]``, ascending.
        prompts: int32 arrays ``[num_tokens]``, one a row.
        group_id, member_id, num_prefix_tokens, priority: the plan's columns, ``[num_rows]``.
    """

    row_ids: npt.NDArray[np.int64]
    prompts: list[npt.NDArray[np.int32]]
    group_id: npt.NDArray[np.int64]
    member_id: npt.NDArray[np.int64]
    num_prefix_tokens: npt.NDArray[np.int32]
    priority: npt.NDArray[np.int64]


def read_partition(plan: ArtifactRef, partition: int) -> Partition:
    """A partition's rows, of which the plan's file holds the row groups together.

    Raises:
        ArtifactError: the plan is not what its reference says, or has no such partition.
    """
    metadata, partitions = _verify_once(plan, *_identity(plan))
    row_groups = np.flatnonzero(partitions == partition).tolist()
    if not row_groups:
        raise ArtifactError(f"{plan.path} has no partition {partition}")
    with pq.ParquetFile(plan.path, metadata=metadata) as file:
        return rebuild_rows(file.read_row_groups(row_groups))


def read_spread_rows(plan: ArtifactRef, num_rows: int) -> Partition:
    """So many rows of a plan, or all where it has fewer, evenly spread over its partitions, each a group of its own."""
    _verify_once(plan, *_identity(plan))
    places = pq.read_table(plan.path, columns=["row_id", "partition"])
    chosen = np.unique(np.linspace(0, places.num_rows - 1, num_rows, dtype=np.int64))
    wanted = places.column("row_id").to_numpy()[chosen]
    prompts: dict[int, npt.NDArray[np.int32]] = {}
    for partition in np.unique(places.column("partition").to_numpy()[chosen]).tolist():
        rows = read_partition(plan, partition)
        positions = np.flatnonzero(np.isin(rows.row_ids, wanted)).tolist()
        prompts |= {int(rows.row_ids[position]): rows.prompts[position] for position in positions}
    row_ids = np.array(sorted(prompts), dtype=np.int64)
    return Partition(
        row_ids=row_ids,
        prompts=[prompts[row_id] for row_id in row_ids.tolist()],
        group_id=np.arange(len(row_ids)),
        member_id=np.zeros(len(row_ids), dtype=np.int64),
        num_prefix_tokens=np.zeros(len(row_ids), dtype=np.int32),
        priority=np.zeros(len(row_ids), dtype=np.int64),
    )


def rebuild_rows(rows: pa.Table) -> Partition:
    """Whole groups of `PLAN_SCHEMA`, in its order, with their prompts put together again."""
    order = np.argsort(rows.column("row_id").to_numpy())
    prompts = rebuild_prompts(rows)
    return Partition(
        row_ids=rows.column("row_id").to_numpy()[order],
        prompts=[prompts[row] for row in order.tolist()],
        group_id=rows.column("group_id").to_numpy()[order],
        member_id=rows.column("member_id").to_numpy()[order],
        num_prefix_tokens=rows.column("num_prefix_tokens").to_numpy()[order],
        priority=rows.column("priority").to_numpy()[order],
    )


def rebuild_prompts(rows: pa.Table) -> list[npt.NDArray[np.int32]]:
    """The prompts of whole groups of `PLAN_SCHEMA`, in its order; identical ones are one array."""
    starts_group = np.diff(rows.column("group_id").to_numpy(), prepend=-1) != 0
    starts_member = starts_group | (np.diff(rows.column("member_id").to_numpy(), prepend=-1) != 0)
    prefix_lens = rows.column("num_prefix_tokens").to_numpy().tolist()
    prefix = prompt = np.empty(0, dtype=np.int32)
    prompts = []
    own_tokens = [own for chunk in rows.column("token_ids").chunks for own in token_arrays(chunk)]
    for own, prefix_len, is_first, is_new in zip(own_tokens, prefix_lens, starts_group, starts_member, strict=True):
        if is_first:
            prefix, prompt = own[:prefix_len], own
        elif is_new:
            prompt = np.concatenate([prefix, own])
        prompts.append(prompt)
    return prompts


def _identity(ref: ArtifactRef) -> tuple[int, int]:
    try:
        found = Path(ref.path).stat()
    except OSError as error:
        raise ArtifactError(f"{ref.path} cannot be read: {error}") from error
    return found.st_size, found.st_mtime_ns


@lru_cache(maxsize=64)
def _verify_once(ref: ArtifactRef, size: int, mtime_ns: int) -> tuple[pq.FileMetaData, npt.NDArray[np.int64]]:
    """The file's metadata and the partition of each row group, once the whole file was read against its digest; not
    again for each partition, until it changes."""
    with open_parquet(ref) as file:
        metadata = file.metadata
        column = file.schema_arrow.get_field_index("partition")
    groups = [metadata.row_group(index).column(column) for index in range(metadata.num_row_groups)]
    return metadata, np.array([group.statistics.min for group in groups], dtype=np.int64)
