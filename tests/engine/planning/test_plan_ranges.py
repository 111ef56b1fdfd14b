"""Plans range by range, and partitions, of random prompts against what they promise."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.planning.plan import PlanMethod, plan_prompts
from engine.planning.plan_partitions import place_groups, split_groups
from engine.planning.plan_ranges import ROW_TOKENS, plan_ranges
from engine.planning.prefix_groups import rebuild_groups

stretches = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), min_size=1, max_size=4)
PROMPTS = st.lists(stretches.map(lambda parts: [token for token, length in parts for _ in range(length)]), max_size=30)
RANGE_TOKENS = st.sampled_from([1, 2 * ROW_TOKENS + 9, 5 * ROW_TOKENS, 10 * ROW_TOKENS, 10**6])


def as_arrays(prompts: list[list[int]]) -> list[np.ndarray]:
    return [np.array(prompt, dtype=np.int32) for prompt in prompts]


@pytest.mark.parametrize("method", ["exact", "paper"])
@given(prompts=PROMPTS, range_tokens=RANGE_TOKENS)
def test_ranges_hold_every_prompt_once_and_lose_only_what_cuts_repeat(
    method: PlanMethod, prompts: list[list[int]], range_tokens: int
) -> None:
    arrays = as_arrays(prompts)
    order = sorted(range(len(arrays)), key=lambda row: (arrays[row].tobytes(), row))
    parts = list(plan_ranges(((row, arrays[row]) for row in order), method=method, range_tokens=range_tokens))
    assert [row for part in parts for row in part.labels] == order
    whole = plan_prompts(arrays, method=method).sharing
    sizes = [sum(len(prompt) + ROW_TOKENS for prompt in part.prompts) for part in parts]
    assert all(size <= range_tokens or len(part.prompts) == 1 for size, part in zip(sizes, parts, strict=True))
    if sum(sizes) <= range_tokens:
        assert len(parts) <= 1
    for part in parts:
        groups = rebuild_groups(part.prompts, part.table.group_id, part.table.member_id, part.table.num_prefix_tokens)
        assert sum(group.num_tokens for group in groups) == part.table.sharing.num_processed_tokens
    num_best = sum(part.table.sharing.num_best_tokens - part.num_repeated_tokens for part in parts)
    assert num_best == whole.num_best_tokens
    num_processed = sum(part.table.sharing.num_processed_tokens for part in parts)
    assert sum(part.table.sharing.num_logical_tokens for part in parts) == whole.num_logical_tokens
    if method == "exact":
        # A cut repeats at most the chosen prefixes on one path, each as long as the beginning that was cut through.
        most = sum(part.num_repeated_tokens * (part.num_repeated_tokens + 1) // 2 for part in parts)
        assert whole.num_processed_tokens <= num_processed <= whole.num_processed_tokens + most


@given(
    prompts=PROMPTS,
    partition_tokens=st.integers(1, 90),
    num_answer_tokens=st.integers(1, 9),
    urgent=st.lists(st.sampled_from([-(2**63), -1, 2**62, 2**62 + 1]), max_size=3),
)
def test_partitions_are_whole_groups_of_near_equal_cost(
    prompts: list[list[int]], partition_tokens: int, num_answer_tokens: int, urgent: list[int]
) -> None:
    arrays = as_arrays(prompts)
    table = plan_prompts(arrays)
    num_prompt_tokens, same = np.array([len(p) for p in prompts], np.int64), np.zeros(len(prompts), np.int64)
    rows = split_groups(table, num_prompt_tokens, partition_tokens, num_answer_tokens, same)
    assert sorted(rows.order.tolist()) == list(range(len(prompts)))
    ordered = [arrays[row] for row in rows.order.tolist()]
    groups = rebuild_groups(ordered, rows.group_id, rows.member_id, rows.num_prefix_tokens)
    costs = [group.num_tokens + num_answer_tokens * len(group.members) for group in groups]
    assert costs == rows.group_costs.tolist()
    num_computed = sum(group.num_tokens for group in groups)
    assert num_computed - table.sharing.num_processed_tokens == rows.num_repeated_tokens
    member_costs = table.sharing.num_logical_tokens + num_answer_tokens * len(prompts)
    assert rows.num_repeated_tokens <= member_costs, "splitting at most doubles what members cost"
    for group, cost in zip(groups, costs, strict=True):
        largest = max(len(member.suffix) + num_answer_tokens for member in group.members)
        if len(group.members) > 1 and 2 * len(group.prefix) <= partition_tokens:
            assert cost <= partition_tokens + largest

    priorities = np.array([*urgent, *[0] * len(groups)], np.int64)[: len(groups)]
    placement = place_groups(rows.group_costs, priorities, partition_tokens)
    turns = sorted(range(len(groups)), key=lambda group: -priorities[group].item())
    in_turn = [int(placement.partitions[group]) for group in turns]
    assert in_turn == sorted(in_turn), "by priority, then as the prefix tree has them"
    assert sorted(set(in_turn)) == list(range(len(placement.costs)))
    assert len(placement.costs) <= -(-sum(costs) // partition_tokens)
    for partition, cost in enumerate(placement.costs.tolist()):
        inside = [costs[group] for group in turns if placement.partitions[group] == partition]
        assert cost == sum(inside)
        assert cost <= partition_tokens + (inside[0] + inside[-1]) / 2 + 1
    handed = [(-int(placement.priorities[p]), -int(placement.costs[p]), p) for p in placement.dispatch_order()]
    assert handed == sorted(handed)
    assert len(handed) == len(placement.costs)
