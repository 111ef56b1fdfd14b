"""Turns tokens.parquet into plan.parquet: prefix groups of rows, in partitions for the workers.

Prompts are sorted (on disk where they do not fit in memory), planned range by range, and written in the plan's order
with each shared prefix once. A worker reads its partition and nothing else.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from prefect import task
from prefect.cache_policies import NO_CACHE

from engine.planning.plan import Plan, SharingStats, common_lens_of, whole_blocks
from engine.planning.plan_partitions import (
    PartitionTokens,
    dispatch_order,
    group_costs,
    place_groups,
    split_groups,
)
from engine.planning.planner import RANGE_TOKENS, PlanMethod, plan_ranges
from tasks.runs.source import Source
from tasks.storage.artifact import ArtifactRef, build_once, open_parquet, write_parquet
from tasks.storage.batches import cut_by, sort_batches, spool
from tasks.storage.plan_file import PlanSummary, plan_batches, schema_with
from tasks.storage.prompt_order import sort_prompts
from tasks.storage.schemas import PLAN_SCHEMA


@task(name="plan_prefix", retries=0, cache_policy=NO_CACHE, persist_result=False)
def plan_prefix(source: Source, tokens: ArtifactRef, num_answer_tokens: int, num_engines: int) -> ArtifactRef:
    """The plan from the database's cache, written if it is not there. See `write_plan`."""
    how = (source.method, source.partition_tokens, num_answer_tokens, source.block_size, source.is_cheapest_first)
    num_engines = num_engines if source.partition_tokens == "auto" else 1
    content = (tokens.digest, *how, num_engines)
    return build_once(source.database, "plan", content, lambda target: write_plan(tokens, target, *how, num_engines))


def write_plan(
    tokens: ArtifactRef,
    target: str | Path,
    method: PlanMethod,
    partition_tokens: PartitionTokens,
    num_answer_tokens: int,
    block_size: int | None = None,
    is_cheapest_first: bool = False,
    num_engines: int = 1,
) -> ArtifactRef:
    """Write `target`: the plan of all prompts in `tokens`. Memory holds one range and a few numbers for each group.

    Args:
        method: how prompts are grouped.
        partition_tokens: approximate cost of a partition; see `engine.planning.plan_partitions`.
        num_answer_tokens: expected of each distinct prompt; part of its cost.
        block_size: tokens of a KV block; groups share whole blocks. None: groups share nothing.
        is_cheapest_first: within a priority, groups with the lowest cost per row go into the first partitions.
        num_engines: that infer the plan, for partitions of "auto".
    Raises:
        ArtifactError: the tokens are not what their reference says, or `target` or its folder cannot be written.
    """
    folder = Path(target).parent
    numbers, sharings = [np.empty((4, 0), np.int64)], list[SharingStats]()
    with ExitStack() as files:
        rows = sort_prompts(files.enter_context(open_parquet(tokens)), folder)
        ranges = plan_ranges(rows, method=method, block_size=block_size, range_tokens=RANGE_TOKENS)
        split = _split_ranges(ranges, numbers, sharings, partition_tokens, num_answer_tokens)
        planned = files.enter_context(spool(split, PLAN_SCHEMA, folder))
        costs, priorities, num_rows, common_lens = np.concatenate(numbers, axis=1)
        ranks = priorities
        if is_cheapest_first:
            from engine.planning.cheapest_first import rank_cheapest_first  # imported only when needed

            ranks = rank_cheapest_first(costs, priorities, num_rows)
        partitions = place_groups(costs - whole_blocks(common_lens, block_size), ranks, partition_tokens, num_engines)
        in_turn = np.argsort(partitions, kind="stable")
        common_lens[in_turn] = common_lens_of(common_lens, in_turn)
        num_shared = whole_blocks(common_lens, block_size)
        num_shared[np.unique(partitions, return_index=True)[1]] = 0  # the first group of each partition
        costs = np.bincount(partitions, weights=costs - num_shared).astype(np.int64)
        highest = np.full(len(costs), np.iinfo(np.int64).min)
        np.maximum.at(highest, partitions, priorities)
        sharing = {field.name: sum(getattr(each, field.name) for each in sharings) for field in fields(SharingStats)}
        sharing["num_processed_tokens"] -= int(num_shared.sum())
        summary = PlanSummary(
            num_rows=int(num_rows.sum()),
            num_groups=len(num_rows),
            num_partitions=len(costs),
            partition_costs=tuple(costs.tolist()),
            partition_rows=tuple(np.bincount(partitions, weights=num_rows).astype(np.int64).tolist()),
            partition_priorities=tuple(highest.tolist()),
            dispatch_order=tuple(dispatch_order(partitions, costs, ranks)),
            sharing=SharingStats(**sharing),
        )
        batches = _place_rows(planned, partitions, common_lens.astype(np.int32))
        if np.any(np.diff(partitions) < 0):
            batches = sort_batches(batches, "partition", folder)
        schema = schema_with(summary)
        # Each partition has row groups of its own, so that `read_partition` reads no other rows.
        cut = (batch.replace_schema_metadata(schema.metadata) for batch in cut_by(batches, "partition"))
        return write_parquet(target, schema, cut)


def _split_ranges(
    ranges: Iterator[tuple[Plan, SharingStats]],
    numbers: list[npt.NDArray[np.int64]],
    sharings: list[SharingStats],
    partition_tokens: PartitionTokens,
    num_answer_tokens: int,
) -> Iterator[pa.RecordBatch]:
    """The groups of all ranges, numbered on, as batches of `PLAN_SCHEMA`; `_place_rows` sets their partitions. For each
    range, `numbers` gets the cost, priority, number of rows, and number of tokens in common with the group before, of
    each group, and `sharings` its tokens."""
    for plan, sharing in ranges:
        split = split_groups(plan, partition_tokens, num_answer_tokens)
        split = replace(split, group_id=split.group_id + sum(part.shape[1] for part in numbers))
        starts, costs = split.group_starts, group_costs(split, num_answer_tokens)
        priorities, num_rows = np.maximum.reduceat(split.priority, starts), np.diff(starts, append=split.num_rows)
        numbers.append(np.stack([costs, priorities, num_rows, split.num_common_tokens[starts]]))
        sharings.append(replace(sharing, num_processed_tokens=split.num_computed_tokens))
        yield from plan_batches(split)


def _place_rows(
    batches: Iterator[pa.RecordBatch], partitions: npt.NDArray[np.int32], common_lens: npt.NDArray[np.int32]
) -> Iterator[pa.RecordBatch]:
    """Set the columns partition and num_common_tokens from the values of each row's group."""
    for batch in batches:
        groups = batch.column("group_id").to_numpy()
        for name, of_group in (("partition", partitions), ("num_common_tokens", common_lens)):
            column = PLAN_SCHEMA.get_field_index(name)
            batch = batch.set_column(column, PLAN_SCHEMA.field(column), pa.array(of_group[groups]))
        yield batch
