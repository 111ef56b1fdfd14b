"""The rows of one partition, gathered from plan.parquet and tokens.parquet."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from engine.errors import ArtifactError
from tasks.artifact import ArtifactRef, open_parquet


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partition:
    """Whole groups of a plan, by row id.

    Attributes:
        row_ids: int64 ``[num_rows]``, ascending.
        prompts: int32 arrays ``[num_tokens]``, one a row.
        group_id, member_id, num_prefix_tokens: the plan's columns, ``[num_rows]``.
    """

    row_ids: npt.NDArray[np.int64]
    prompts: list[npt.NDArray[np.int32]]
    group_id: npt.NDArray[np.int64]
    member_id: npt.NDArray[np.int64]
    num_prefix_tokens: npt.NDArray[np.int32]


def read_partition(plan: ArtifactRef, tokens: ArtifactRef, partition: int) -> Partition:
    """Gather a partition; of the tokens only the row groups that hold its rows are read.

    Raises:
        ArtifactError: a file is not what its reference says, or the plan has no such partition.
    """
    for ref in (plan, tokens):
        _verify_once(ref, *_identity(ref))
    rows = pq.read_table(plan.path, filters=[("partition", "=", partition)]).sort_by("row_id")
    if rows.num_rows == 0:
        raise ArtifactError(f"{plan.path} has no partition {partition}")
    row_ids = rows.column("row_id").to_numpy()
    return Partition(
        row_ids=row_ids,
        prompts=_read_prompts(tokens.path, row_ids),
        group_id=rows.column("group_id").to_numpy(),
        member_id=rows.column("member_id").to_numpy(),
        num_prefix_tokens=rows.column("num_prefix_tokens").to_numpy(),
    )


def _read_prompts(path: str, row_ids: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int32]]:
    """The prompts of ascending row ids; a row id is the row's position in the file."""
    prompts: list[npt.NDArray[np.int32]] = []
    with pq.ParquetFile(path) as file:
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        bounds = np.searchsorted(row_ids, starts)
        for group in np.flatnonzero(np.diff(bounds)).tolist():
            table = file.read_row_group(group, columns=["row_id", "token_ids"])
            wanted = table.take(pa.array(row_ids[bounds[group] : bounds[group + 1]] - starts[group]))
            if not np.array_equal(wanted.column("row_id").to_numpy(), row_ids[bounds[group] : bounds[group + 1]]):
                raise ArtifactError(f"{path}: row ids of row group {group} are not the rows' positions")
            prompts += [prompt.to_numpy() for prompt in _lists(wanted.column("token_ids"))]
    if len(prompts) != len(row_ids):
        raise ArtifactError(f"{path} holds {len(prompts)} of the {len(row_ids)} rows that the plan names")
    return prompts


def _lists(column: pa.ChunkedArray) -> Iterator[pa.Array]:
    """Each row's values, without a copy."""
    for chunk in column.chunks:
        for start, end in pairwise(chunk.offsets.to_pylist()):
            yield chunk.values.slice(start, end - start)


def _identity(ref: ArtifactRef) -> tuple[int, int]:
    try:
        found = Path(ref.path).stat()
    except OSError as error:
        raise ArtifactError(f"{ref.path} cannot be read: {error}") from error
    return found.st_size, found.st_mtime_ns


@lru_cache(maxsize=64)
def _verify_once(ref: ArtifactRef, size: int, mtime_ns: int) -> None:
    """Read the whole file against its digest once, not again for each partition, until it changes."""
    open_parquet(ref).close()
