"""Partitions: the units of work that workers take, consecutive groups of near-equal predicted cost.

Cost is counted in tokens that go through the layers: prompt tokens that the plan computes, and tokens of answers.
A group that costs more than a partition is split; each piece computes the prefix again. That at most doubles what its
members cost, because a group whose prefix takes more than half of a partition stays whole.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from engine.kernels import cdiv
from engine.planning.plan import Plan, common_lens_of
from engine.planning.prefix_tree import IndexArray

PartitionTokens = int | Literal["auto"]
"""Cost of a partition. The last steps of each have less to do than the device could, so "auto" makes them as large as
leaves enough of them for several engines to end together."""

NUM_PARTITIONS, LEAST_TOKENS, MOST_TOKENS = 32, 500_000, 5_000_000
"""How many partitions "auto" makes, and what one costs then at least and at most."""


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

    def common_lens(self, common_lens: IndexArray) -> IndexArray:
        """Tokens that each group has in common with the group before it in the order of partitions, given those that it
        has in common with the one before it in prefix tree order: int64 ``[num_groups]``."""
        order = np.argsort(self.partitions, kind="stable")
        placed = np.empty_like(common_lens)
        placed[order] = common_lens_of(common_lens, order)
        return placed


def group_costs(plan: Plan, num_answer_tokens: int) -> IndexArray:
    """Predicted cost of each group, int64 ``[num_groups]``, with so many answer tokens of each distinct prompt."""
    is_new, starts = plan.is_member_start, plan.group_starts
    group_of_row = np.cumsum(plan.is_group_start) - 1
    costs = (plan.num_prompt_tokens - plan.num_prefix_tokens + num_answer_tokens)[is_new]
    sums = np.bincount(group_of_row[is_new], weights=costs, minlength=len(starts))
    return np.asarray(sums.astype(np.int64) + plan.num_prefix_tokens[starts])


def split_groups(plan: Plan, partition_tokens: PartitionTokens, num_answer_tokens: int) -> Plan:
    """Splits the groups that cost more than a partition. Members of the highest priority are in the first pieces.

    Args:
        plan: of whole groups; those of the result count from 0.
        partition_tokens: cost of a partition; the least one where it is "auto".
        num_answer_tokens: expected of each distinct prompt.
    """
    if partition_tokens == "auto":
        partition_tokens = LEAST_TOKENS
    if not plan.num_rows:
        return plan
    plan = _most_urgent_first(plan)
    is_new = plan.is_member_start
    member_of_row = np.cumsum(is_new) - 1
    groups = (np.cumsum(plan.is_group_start) - 1)[is_new]
    prefixes = plan.num_prefix_tokens[is_new].astype(np.int64)
    costs = plan.num_prompt_tokens[is_new] - prefixes + num_answer_tokens
    pieces = _number_pieces(groups, costs, prefixes, partition_tokens)
    starts = np.flatnonzero(np.diff(pieces, prepend=-1))
    # A piece begins as the piece before it: with the prefix.
    is_first_piece = np.diff(groups, prepend=-1) != 0
    common = np.where(is_first_piece, plan.num_common_tokens[is_new], prefixes)[starts]
    prefixes[np.bincount(pieces)[pieces] == 1] = 0  # split off alone, a prompt has nobody to share with
    return replace(
        plan,
        group_id=pieces[member_of_row],
        member_id=(np.arange(len(pieces)) - starts[pieces])[member_of_row],
        num_prefix_tokens=prefixes[member_of_row].astype(np.int32),
        num_common_tokens=common[pieces][member_of_row].astype(np.int32),
    )


def place_groups(group_costs: IndexArray, group_priorities: IndexArray, partition_tokens: PartitionTokens) -> Placement:
    """Partitions of near-equal cost, about `partition_tokens`: a group is where its middle lies.

    Args:
        group_costs, group_priorities: int64 ``[num_groups]``, in prefix tree order; higher priorities come first.
        partition_tokens: cost of a partition.
    """
    turns = np.argsort(-np.unique(group_priorities, return_inverse=True)[1], kind="stable")
    costs = group_costs[turns]
    total = int(costs.sum())
    if partition_tokens == "auto":
        partition_tokens = min(max(cdiv(total, NUM_PARTITIONS), LEAST_TOKENS), MOST_TOKENS)
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


def _most_urgent_first(plan: Plan) -> Plan:
    """Members with the highest priority come first in their group; a prompt has the highest priority of its rows."""
    is_new = plan.is_member_start
    highest = np.maximum.reduceat(plan.priority, np.flatnonzero(is_new))
    turns = np.unique(highest, return_inverse=True)[1][np.cumsum(is_new) - 1]
    return plan.take(np.lexsort((plan.member_id, -turns, plan.group_id)))


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
    is_start = (np.diff(groups, prepend=-1) != 0) | (np.diff(piece, prepend=-1) != 0)
    return np.asarray(np.cumsum(is_start) - 1)
