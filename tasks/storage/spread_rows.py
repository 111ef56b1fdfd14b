"""Reads some rows of a plan, spread over all of it."""

import numpy as np

from engine.planning.plan import Plan
from tasks.storage.artifact import ArtifactRef
from tasks.storage.plan_file import read_partition, read_plan_summary


def read_spread_rows(plan: ArtifactRef, num_rows: int) -> list[Plan]:
    """`num_rows` rows of a plan (all if it has fewer), evenly spread over its partitions, each as a plan of one row."""
    num_rows_of = read_plan_summary(plan).partition_rows
    partitions = np.repeat(np.arange(len(num_rows_of)), num_rows_of)
    chosen = np.unique(np.linspace(0, len(partitions) - 1, num_rows, dtype=np.int64))
    rows = []
    for partition in np.unique(partitions[chosen]).tolist():
        inside = chosen[partitions[chosen] == partition] - np.searchsorted(partitions, partition)
        whole = read_partition(plan, partition)
        rows += [whole.take(np.array([position])) for position in inside.tolist()]
    return rows
