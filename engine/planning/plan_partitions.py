"""Partitions: the units of work that workers take, consecutive groups of near-equal predicted cost.

The cost is the number of tokens that go through the layers: prompt tokens that the plan computes, and answer tokens. A
group that costs more than a partition is split, and each piece computes the prefix again. That at most doubles its
cost, because a group whose prefix takes more than half of a partition is not split.
"""

from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from engine.kernels import cdiv
from engine.planning.plan import Plan
from engine.planning.prefix_tree import IndexArray

PartitionTokens = int | Literal["auto"]
"""Cost of a partition. The last steps of each partition do not fill the device, so "auto" makes partitions as large as
possible with enough of them for several engines to finish together."""

NUM_PARTITIONS, LEAST_TOKENS, MOST_TOKENS = 32, 500_000, 5_000_000
"""Number of partitions that "auto" makes, and the least and the most cost of one."""


def group_costs(plan: Plan, num_answer_tokens: int) -> IndexArray:
    """Predicted cost of each group, int64 ``[num_groups]``, at `num_answer_tokens` for each distinct prompt."""
    is_new, starts = plan.is_member_start, plan.group_starts
    group_of_row = np.cumsum(plan.is_group_start) - 1
    costs = (plan.num_prompt_tokens - plan.num_prefix_tokens + num_answer_tokens)[is_new]
    sums = np.bincount(group_of_row[is_new], weights=costs, minlength=len(starts))
    return np.asarray(sums.astype(np.int64) + plan.num_prefix_tokens[starts])


def split_groups(plan: Plan, partition_tokens: PartitionTokens, num_answer_tokens: int) -> Plan:
    """Splits the groups that cost more than a partition. The first pieces have the members of the highest priority.

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
    # Consecutive pieces of one group have its whole prefix in common.
    is_first_piece = np.diff(groups, prepend=-1) != 0
    common = np.where(is_first_piece, plan.num_common_tokens[is_new], prefixes)[starts]
    prefixes[np.bincount(pieces)[pieces] == 1] = 0  # a piece of one prompt shares no prefix
    return replace(
        plan,
        group_id=pieces[member_of_row],
        member_id=(np.arange(len(pieces)) - starts[pieces])[member_of_row],
        num_prefix_tokens=prefixes[member_of_row].astype(np.int32),
        num_common_tokens=common[pieces][member_of_row].astype(np.int32),
    )


def place_groups(
    group_costs: IndexArray, group_priorities: IndexArray, partition_tokens: PartitionTokens, num_engines: int = 1
) -> npt.NDArray[np.int32]:
    """The partition of each group, int32 ``[num_groups]``, numbered from 0 without a gap; none has a higher priority
    than the one before. Their costs are near-equal: the middle of a group's cost decides its partition.

    Args:
        group_costs, group_priorities: int64 ``[num_groups]``, in prefix tree order; higher priorities come first.
        partition_tokens: cost of a partition.
        num_engines: that take the partitions; "auto" makes a multiple of it, so that they finish together.
    """
    turns = np.argsort(-np.unique(group_priorities, return_inverse=True)[1], kind="stable")
    costs = group_costs[turns]
    total = int(costs.sum())
    is_auto = partition_tokens == "auto"
    if partition_tokens == "auto":
        partition_tokens = min(max(cdiv(total, NUM_PARTITIONS), LEAST_TOKENS), MOST_TOKENS)
    num_windows = cdiv(total, partition_tokens)
    if is_auto and 2 * total >= num_engines * LEAST_TOKENS:  # else some engines get nothing
        num_windows = num_engines * max(1, round(num_windows / num_engines))
    middles = np.cumsum(costs) - (costs + 1) // 2
    window = middles * num_windows // total if total else middles
    partitions = np.empty(len(costs), dtype=np.int32)
    partitions[turns] = np.unique(window, return_inverse=True)[1]
    return partitions


def dispatch_order(partitions: npt.NDArray[np.int32], costs: IndexArray, group_priorities: IndexArray) -> list[int]:
    """The order in which workers take `partitions` so that they finish together: highest priority first, then the most
    expensive first (LPT). `costs` are of each partition, the others of each group. See `place_groups`."""
    highest = np.full(len(costs), np.iinfo(np.int64).min)
    np.maximum.at(highest, partitions, group_priorities)
    order: list[int] = np.lexsort((-costs, -np.unique(highest, return_inverse=True)[1])).tolist()
    return order


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
