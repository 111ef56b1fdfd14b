"""Where a batch larger than a range is cut, and the tokens that two ranges have in common."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engine.planning.plan import Plan
from engine.planning.planner import Row, count_size
from engine.planning.prefix_tree import TokenArray, common_prefix_len

WINDOW_SHARE = 0.25
"""Share of a range, at its end, in which its cut is searched."""


def find_cut(rows: Sequence[Row], following: Row, num_tokens: int) -> int:
    """How many of the pending `rows`, of size num_tokens, are in the range; `following` comes after them. It is cut in
    the window at its end, where neighbours have the shortest common prefix, as late as possible. See `count_size`."""
    right, end, shortest = following, len(rows), len(following[-1]) + 1
    num_left = 0
    for position in range(len(rows), 0, -1):
        left = rows[position - 1]
        common = common_prefix_len(left[-1], right[-1])
        if common < shortest:
            end, shortest = position, common
        num_left += count_size(left)
        if shortest == 0 or num_left > WINDOW_SHARE * num_tokens:
            break
        right = left
    return end


def num_shared_tokens(left: TokenArray, right: TokenArray) -> int:
    """Tokens of `right` that the prefix tree of both holds only once."""
    common = common_prefix_len(left, right)
    return common if common == len(left) == len(right) else min(common, len(left) - 1, len(right) - 1)


def join_ranges(before: Plan, plan: Plan) -> Plan:
    """The plan with num_common_tokens of its first group, given one row of the last group of the range before."""
    (one, num_one), (other, num_other) = _leading_tokens(before), _leading_tokens(plan)
    num_common_tokens = min(common_prefix_len(one, other), num_one, num_other)
    return replace(plan, num_common_tokens=np.where(plan.group_id == 0, num_common_tokens, plan.num_common_tokens))


def _leading_tokens(plan: Plan) -> tuple[TokenArray, int]:
    """The prompt of the first row, and how many of its tokens are `PrefixGroup.leading_tokens`."""
    prompt = plan.prompts[0]
    return prompt, int(plan.num_prefix_tokens[0]) or len(prompt) - 1
