"""plan.parquet: its columns, its summary, and prompts as lists of tokens."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from engine.planning.sharing_stats import SharingStats
from tasks.storage.artifact import ArtifactRef, open_parquet

PLAN_SCHEMA = pa.schema(
    [
        pa.field("row_id", pa.int64(), nullable=False),
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("member_id", pa.int64(), nullable=False),
        pa.field("num_prefix_tokens", pa.int32(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("priority", pa.int64(), nullable=False),
        pa.field("token_ids", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
    ]
)
"""One row a row without error, by partition, group, member, row. token_ids are those that the rows before do not have:
of a group's first row the whole prompt, of another member's first row what follows the prefix, else none. The schema's
metadata holds the `PlanSummary`."""

_SUMMARY_KEY = b"batchloom.plan_summary"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """A plan in numbers.

    Attributes:
        num_rows: planned; rows with an error are not.
        num_partitions: numbered from 0, by priority, none empty.
        partition_costs: predicted, of each partition; see `engine.planning.plan_partitions`.
        dispatch_order: partitions in the order in which workers should take them so that all finish together.
        sharing: prompt tokens without and with the plan's prefixes.
    """

    num_rows: int
    num_groups: int
    num_partitions: int
    partition_costs: tuple[int, ...]
    dispatch_order: tuple[int, ...]
    sharing: SharingStats


def schema_with(summary: PlanSummary) -> pa.Schema:
    """`PLAN_SCHEMA` for a file that has this summary."""
    return PLAN_SCHEMA.with_metadata({_SUMMARY_KEY: json.dumps(asdict(summary))})


def read_plan_summary(plan: ArtifactRef) -> PlanSummary:
    """The numbers of a plan; `ArtifactError` where the file is not what its reference says."""
    with open_parquet(plan) as file:
        values = json.loads(file.schema_arrow.metadata[_SUMMARY_KEY])
    lists = {name: tuple(values[name]) for name in ("partition_costs", "dispatch_order")}
    return PlanSummary(**{**values, **lists, "sharing": SharingStats(**values["sharing"])})


def token_arrays(lists: pa.ListArray) -> list[npt.NDArray[np.int32]]:
    """Each row's values, without a copy."""
    values, offsets = lists.values.to_numpy(), lists.offsets.to_pylist()
    return [values[start:end] for start, end in pairwise(offsets)]


def list_tokens(prompts: Sequence[npt.NDArray[np.int32]]) -> pa.ListArray:
    """One row a prompt; `token_arrays` is its inverse."""
    offsets = np.cumsum([0, *map(len, prompts)])
    values = np.concatenate([np.empty(0, np.int32), *prompts])
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), pa.array(values), PLAN_SCHEMA.field("token_ids").type
    )
