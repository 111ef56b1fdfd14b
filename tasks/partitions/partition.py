"""Rows of plan.parquet: one partition, a sample, or all."""

from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from engine.errors import ArtifactError
from engine.planning.plan import Plan
from tasks.storage.artifact import ArtifactRef, open_parquet
from tasks.storage.plan_file import read_rows


def read_partition(plan: ArtifactRef, partition: int) -> Plan:
    """A partition's rows, of which the plan's file holds the row groups together.

    Raises:
        ArtifactError: the plan is not what its reference says, or has no such partition.
    """
    metadata, partitions = _verify_once(plan, *_identity(plan))
    row_groups = np.flatnonzero(partitions == partition).tolist()
    if not row_groups:
        raise ArtifactError(f"{plan.path} has no partition {partition}")
    with pq.ParquetFile(plan.path, metadata=metadata) as file:
        return read_rows(file.read_row_groups(row_groups))


def read_spread_rows(plan: ArtifactRef, num_rows: int) -> list[Plan]:
    """So many rows of a plan, or all where it has fewer, evenly spread over its partitions, each a plan of one row."""
    _verify_once(plan, *_identity(plan))
    partitions = pq.read_table(plan.path, columns=["partition"]).column("partition").to_numpy()
    chosen = np.unique(np.linspace(0, len(partitions) - 1, num_rows, dtype=np.int64))
    rows = []
    for partition in np.unique(partitions[chosen]).tolist():
        inside = chosen[partitions[chosen] == partition] - np.searchsorted(partitions, partition)
        whole = read_partition(plan, partition)
        rows += [whole.take(np.array([position])) for position in inside.tolist()]
    return rows


def read_all_rows(plan: ArtifactRef) -> Plan:
    """The whole plan in memory; `ArtifactError` where the file is not what its reference says."""
    with open_parquet(plan) as file:
        return read_rows(file.read())


def _identity(ref: ArtifactRef) -> tuple[int, int]:
    try:
        found = Path(ref.path).stat()
    except OSError as error:
        raise ArtifactError(f"{ref.path} cannot be read: {error}") from error
    return found.st_size, found.st_mtime_ns


@lru_cache(maxsize=64)
def _verify_once(ref: ArtifactRef, size: int, mtime_ns: int) -> tuple[pq.FileMetaData, npt.NDArray[np.int64]]:
    """The file's metadata and the partition of each row group. The file's digest is checked the first time, and again
    when the file has changed."""
    with open_parquet(ref) as file:
        metadata = file.metadata
        column = file.schema_arrow.get_field_index("partition")
    groups = [metadata.row_group(index).column(column) for index in range(metadata.num_row_groups)]
    return metadata, np.array([group.statistics.min for group in groups], dtype=np.int64)
