"""Reads plan.parquet for other uses than inference: all rows, a sample of the rows, the number of rows."""

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from engine.planning.plan import Plan
from tasks.storage.artifact import ArtifactRef, open_parquet
from tasks.storage.plan_file import read_partition, read_rows, verify_once


def read_spread_rows(plan: ArtifactRef, num_rows: int) -> list[Plan]:
    """`num_rows` rows of a plan (all if it has fewer), evenly spread over its partitions, each as a plan of one row."""
    verify_once(plan)
    partitions = pq.read_table(plan.path, columns=["partition"]).column("partition").to_numpy()
    chosen = np.unique(np.linspace(0, len(partitions) - 1, num_rows, dtype=np.int64))
    rows = []
    for partition in np.unique(partitions[chosen]).tolist():
        inside = chosen[partitions[chosen] == partition] - np.searchsorted(partitions, partition)
        whole = read_partition(plan, partition)
        rows += [whole.take(np.array([position])) for position in inside.tolist()]
    return rows


def count_partition_rows(plan: ArtifactRef) -> npt.NDArray[np.int64]:
    """The number of rows of each partition."""
    with open_parquet(plan) as file:
        return np.bincount(file.read(columns=["partition"]).column("partition").to_numpy())


def read_all_rows(plan: ArtifactRef) -> Plan:
    """The whole plan in memory; `ArtifactError` where the file is not what its reference says."""
    with open_parquet(plan) as file:
        return read_rows(file.read())
