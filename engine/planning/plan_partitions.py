"""Partitions: the units of work that workers take, of near-equal predicted cost, whole groups where that is possible.

Cost is counted in prompt tokens: one for each prompt token that the plan computes, and `ANSWER_TOKEN_COST` for each
token of an answer. Partitions are consecutive groups, in prefix tree order within a priority, so that groups that begin
alike stay together. A group that costs more than a partition is split into groups of their own, each of which computes
the prefix again. That at most doubles what its members cost, because a group whose prefix takes more than half of a
partition stays whole.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.kernels import cdiv
from engine.planning.plan import PlanTable
from engine.planning.prefix_tree import IndexArray

ANSWER_TOKEN_COST = 1
"""A token of an answer goes through the layers once, as a prompt token does."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupedRows:
    """Rows of a plan whose large groups are split, by group, member, then as they were given.

    Attributes:
        order: int64 ``[num_rows]``, positions of the rows among those given.
        group_id: int64 ``[num_rows]``, ascending from 0.
        member_id: int64 ``[num_rows]``, 0 .. members of the group - 1.
        num_prefix_tokens: int32 ``[num_rows]``.
        group_costs: int64 ``[num_groups]``, predicted.
        num_repeated_tokens: prefix tokens that are computed again because groups are split.
    """

    order: IndexArray
    group_id: IndexArray
    member_id: IndexArray
    num_prefix_tokens: npt.NDArray[np.int32]
    group_costs: IndexArray
    num_repeated_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """Which groups make up which partition.

    Attributes:
        partitions: int32 ``[num_groups]``, 0 .. partitions - 1 without a gap.
        costs: int64 ``[num_partitions]``, predicted.
        priorities: int64 ``[num_partitions]``, the highest in it; never rising.
    """

    partitions: npt.NDArray[np.int32]
    costs: IndexArray
    priorities: IndexArray

    def dispatch_order(self) -> list[int]:
        """The order in which workers should take partitions so that all finish together: the largest first (LPT), but
        none before one of a higher priority."""
        turns = np.cumsum(np.diff(self.priorities, prepend=self.priorities[:1]) != 0)
        return [int(partition) for partition in np.lexsort((-self.costs, turns))]


def split_groups(
    table: PlanTable,
    num_prompt_tokens: IndexArray,
    partition_tokens: int,
    num_answer_tokens: int,
    priorities: IndexArray,
) -> GroupedRows:
    """Splits the groups of a plan that cost more than a partition, so that few of the pieces are urgent.

    Args:
        num_prompt_tokens: int64 ``[num_rows]``.
        partition_tokens: cost of a partition.
        num_answer_tokens: expected of each distinct prompt.
        priorities: int64 ``[num_rows]``; members of a group come by descending priority.
    """
    order = _most_urgent_first(table, priorities)
    groups, members = table.group_id[order], table.member_id[order]
    starts_member = _starts_run(groups, members)
    member_of_row = np.cumsum(starts_member) - 1
    # From here on by distinct prompt, then by group.
    groups, num_tokens = groups[starts_member], num_prompt_tokens[order][starts_member]
    prefixes = table.num_prefix_tokens[order][starts_member].astype(np.int64)
    costs = num_tokens - prefixes + ANSWER_TOKEN_COST * num_answer_tokens
    new_groups = _number_pieces(groups, costs, prefixes, partition_tokens)
    is_alone = np.bincount(new_groups)[new_groups] == 1
    prefixes[is_alone] = 0  # split off alone, a prompt has nobody to share with
    costs = num_tokens - prefixes + ANSWER_TOKEN_COST * num_answer_tokens
    starts = np.flatnonzero(np.diff(new_groups, prepend=-1))
    num_computed_tokens = int((num_tokens - prefixes).sum() + prefixes[starts].sum())
    return GroupedRows(
        order=order,
        group_id=new_groups[member_of_row],
        member_id=(np.arange(len(new_groups)) - starts[new_groups])[member_of_row],
        num_prefix_tokens=prefixes[member_of_row].astype(np.int32),
        group_costs=np.bincount(new_groups, weights=costs).astype(np.int64) + prefixes[starts],
        num_repeated_tokens=num_computed_tokens - table.sharing.num_processed_tokens,
    )


def _most_urgent_first(table: PlanTable, priorities: IndexArray) -> IndexArray:
    """Rows by group, then member; members with the highest priority come first, a prompt having its rows' highest."""
    order = np.lexsort((table.member_id, table.group_id))
    groups, members = table.group_id[order], table.member_id[order]
    starts_member = _starts_run(groups, members)
    if not len(order):
        return order
    highest = np.maximum.reduceat(priorities[order], np.flatnonzero(starts_member))
    turns = np.unique(highest, return_inverse=True)[1][np.cumsum(starts_member) - 1]
    by_turn: IndexArray = order[np.lexsort((members, -turns, groups))]
    return by_turn


def place_groups(group_costs: IndexArray, group_priorities: IndexArray, partition_tokens: int) -> Placement:
    """Partitions of near-equal cost, about `partition_tokens`: a group is where its middle lies.

    Args:
        group_costs, group_priorities: int64 ``[num_groups]``, in prefix tree order; higher priorities come first.
    """
    turns = np.argsort(-np.unique(group_priorities, return_inverse=True)[1], kind="stable")
    costs = group_costs[turns]
    total = int(costs.sum())
    num_windows = cdiv(total, partition_tokens)
    middles = np.cumsum(costs) - (costs + 1) // 2
    window = middles * num_windows // total if total else middles
    in_turn = np.unique(window, return_inverse=True)[1]
    partitions = np.empty(len(costs), dtype=np.int32)
    partitions[turns] = in_turn
    firsts = np.flatnonzero(np.diff(in_turn, prepend=-1))
    return Placement(
        partitions=partitions,
        costs=np.bincount(in_turn, weights=costs).astype(np.int64),
        priorities=group_priorities[turns][firsts],
    )


def _number_pieces(groups: IndexArray, costs: IndexArray, prefixes: IndexArray, partition_tokens: int) -> IndexArray:
    """The new group of each distinct prompt, from 0; pieces of one group cost about the same."""
    num_members = np.bincount(groups)
    starts = np.cumsum(num_members) - num_members
    member_costs = np.bincount(groups, weights=costs).astype(np.int64)
    prefix = prefixes[starts]
    is_split = (member_costs + prefix > partition_tokens) & (2 * prefix <= partition_tokens)
    num_pieces = np.where(is_split, cdiv(member_costs, np.maximum(partition_tokens - prefix, 1)), 1)
    costs_before = np.cumsum(costs) - costs
    middles = costs_before - costs_before[starts][groups] + costs // 2
    piece = middles * num_pieces[groups] // member_costs[groups]
    numbers: IndexArray = np.cumsum(_starts_run(groups, piece)) - 1
    return numbers


def _starts_run(*columns: IndexArray) -> npt.NDArray[np.bool_]:
    """Where any of the columns, all of them from 0 on, has another value than in the row before."""
    changes = np.diff(np.stack(columns), prepend=-1) != 0
    return np.asarray(changes.any(axis=0))
