"""tokens.parquet to plan.parquet: which rows share which prefix, cut into partitions for the workers.

Prompts are sorted on disk where they do not fit in memory, planned range by range, and written in the order of the plan
with each shared prefix once, so that a worker reads its partition and nothing else.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from prefect import task
from prefect.cache_policies import NO_CACHE

from engine.planning.plan import PlanMethod
from engine.planning.plan_partitions import GroupedRows, Placement, place_groups, split_groups
from engine.planning.plan_ranges import RANGE_TOKENS, PlanRange, plan_ranges
from engine.planning.sharing_stats import SharingStats
from tasks.runs.artifact_cache import build_once
from tasks.storage.artifact import ArtifactRef, open_parquet, write_parquet
from tasks.storage.external_sort import MEMORY_LIMIT, cut_by, sort_batches
from tasks.storage.plan_file import PLAN_SCHEMA, PlanSummary, list_tokens, schema_with
from tasks.storage.prompt_order import BUCKET_TOKENS, sort_prompts
from tasks.storage.spill_file import SpillFile

CODE = (
    __name__,
    *(
        "engine.planning.plan",
        "engine.planning.plan_partitions",
        "engine.planning.plan_ranges",
        "engine.planning.prefix_tree",
    ),
    *("tasks.storage.external_sort", "tasks.storage.plan_file", "tasks.storage.prompt_order"),
)
"""Modules that decide what a plan is."""

BATCH_ROWS = 4096
BATCH_TOKENS = 1_000_000


@task(name="plan_prefix", retries=0, cache_policy=NO_CACHE, persist_result=False)
def plan_prefix(
    database: str, tokens: ArtifactRef, method: PlanMethod, partition_tokens: int, num_answer_tokens: int
) -> ArtifactRef:
    """`write_plan` into the database's cache, unless the same tokens were planned before with the same settings."""
    content = (tokens.digest, method, partition_tokens, num_answer_tokens)

    def write(target: Path) -> ArtifactRef:
        return write_plan(tokens, target, method, partition_tokens, num_answer_tokens)

    return build_once(database, "plan", content, CODE, write)


def write_plan(
    tokens: ArtifactRef,
    target: str | Path,
    method: PlanMethod,
    partition_tokens: int,
    num_answer_tokens: int,
    *,
    range_tokens: int = RANGE_TOKENS,
    bucket_tokens: int = BUCKET_TOKENS,
    memory_limit: str = MEMORY_LIMIT,
) -> ArtifactRef:
    """Write `target`: the plan of all prompts in `tokens`. In memory are one range and a few numbers a group.

    Args:
        partition_tokens: cost of one partition, about; see `engine.planning.plan_partitions`.
        num_answer_tokens: expected of each distinct prompt; they count as work.
        range_tokens: see `plan_ranges`.
        bucket_tokens: see `sort_prompts`.
        memory_limit: see `sort_batches`.
    Raises:
        ArtifactError: the tokens are not what their reference says, or `target` or its folder cannot be written.
    """
    folder = Path(target).parent
    totals = _Totals()
    with open_parquet(tokens) as file, SpillFile(folder) as planned:
        rows = sort_prompts(file, folder, bucket_tokens=bucket_tokens, memory_limit=memory_limit)
        ranges = plan_ranges(rows, method=method, range_tokens=range_tokens)
        planned.write_batches(PLAN_SCHEMA, _plan_batches(ranges, totals, partition_tokens, num_answer_tokens))
        placement = place_groups(*totals.groups(), partition_tokens)
        summary = PlanSummary(
            num_rows=totals.num_rows,
            num_groups=len(placement.partitions),
            num_partitions=len(placement.costs),
            partition_costs=tuple(placement.costs.tolist()),
            dispatch_order=tuple(placement.dispatch_order()),
            sharing=totals.sharing,
        )
        batches = _place_rows(planned.read_batches(), placement)
        if np.any(np.diff(placement.partitions) < 0):
            batches = sort_batches(batches, "partition", folder, memory_limit=memory_limit)
        schema = schema_with(summary)
        # A partition has row groups of its own.
        cut = (batch.replace_schema_metadata(schema.metadata) for batch in cut_by(batches, "partition"))
        return write_parquet(target, schema, cut)


class _Totals:
    """What is summed up over the ranges of a plan."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.num_groups = 0
        self.sharing = SharingStats(num_logical_tokens=0, num_processed_tokens=0, num_best_tokens=0)
        self._costs = [np.empty(0, np.int64)]
        self._priorities = [np.empty(0, np.int64)]

    def add(self, part: PlanRange[tuple[int, int]], rows: GroupedRows, priorities: npt.NDArray[np.int64]) -> None:
        sharing = part.table.sharing
        self.num_rows += len(rows.order)
        self.num_groups += len(rows.group_costs)
        self.sharing = SharingStats(
            num_logical_tokens=self.sharing.num_logical_tokens + sharing.num_logical_tokens,
            num_processed_tokens=self.sharing.num_processed_tokens
            + sharing.num_processed_tokens
            + rows.num_repeated_tokens,
            num_best_tokens=self.sharing.num_best_tokens + sharing.num_best_tokens - part.num_repeated_tokens,
        )
        self._costs.append(rows.group_costs)
        group_starts = np.flatnonzero(np.diff(rows.group_id, prepend=-1))
        self._priorities.append(np.maximum.reduceat(priorities, group_starts))

    def groups(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Costs and priorities of all groups."""
        return np.concatenate(self._costs), np.concatenate(self._priorities)


def _plan_batches(
    ranges: Iterator[PlanRange[tuple[int, int]]], totals: _Totals, partition_tokens: int, num_answer_tokens: int
) -> Iterator[pa.RecordBatch]:
    """Rows of `PLAN_SCHEMA` by group, member, row; all in partition 0 so far."""
    for part in ranges:
        num_prompt_tokens = np.fromiter(map(len, part.prompts), dtype=np.int64, count=len(part.prompts))
        labels = np.array(part.labels, dtype=np.int64)
        rows = split_groups(part.table, num_prompt_tokens, partition_tokens, num_answer_tokens, labels[:, 1])
        row_ids, priorities = labels[rows.order].T  # of equal prompts by row id, as sorted
        group_ids = rows.group_id + totals.num_groups
        totals.add(part, rows, priorities)
        starts_group = np.diff(rows.group_id, prepend=-1) != 0
        starts_member = starts_group | (np.diff(rows.member_id, prepend=-1) != 0)
        skipped = np.where(
            starts_group, 0, np.where(starts_member, rows.num_prefix_tokens, num_prompt_tokens[rows.order])
        )
        own = [part.prompts[row][start:] for row, start in zip(rows.order.tolist(), skipped.tolist(), strict=True)]
        columns = (row_ids, group_ids, rows.member_id, rows.num_prefix_tokens, np.zeros_like(row_ids), priorities)
        for start, end in _batch_bounds(own):
            arrays = [
                pa.array(column[start:end], field.type, safe=True)
                for column, field in zip(columns, PLAN_SCHEMA, strict=False)
            ]
            yield pa.RecordBatch.from_arrays([*arrays, list_tokens(own[start:end])], schema=PLAN_SCHEMA)


def _batch_bounds(prompts: Sequence[npt.NDArray[np.int32]]) -> Iterator[tuple[int, int]]:
    """Of batches of at most `BATCH_ROWS` rows and about `BATCH_TOKENS` tokens."""
    start = num_tokens = 0
    for row, prompt in enumerate(prompts):
        num_tokens += len(prompt)
        if num_tokens >= BATCH_TOKENS or row + 1 - start == BATCH_ROWS:
            yield start, row + 1
            start, num_tokens = row + 1, 0
    if start < len(prompts):
        yield start, len(prompts)


def _place_rows(batches: Iterator[pa.RecordBatch], placement: Placement) -> Iterator[pa.RecordBatch]:
    column = PLAN_SCHEMA.get_field_index("partition")
    for batch in batches:
        partitions = placement.partitions[batch.column("group_id").to_numpy()]
        yield batch.set_column(column, PLAN_SCHEMA.field(column), pa.array(partitions))
