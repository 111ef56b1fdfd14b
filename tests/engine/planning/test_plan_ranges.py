"""Plans range by range, and partitions, of random prompts against what they promise."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.planning.plan import Plan, common_lens_of
from engine.planning.plan_partitions import dispatch_order, group_costs, place_groups, split_groups
from engine.planning.planner import ROW_TOKENS, PlanMethod, plan_prompts, plan_ranges

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
    rows = ((row, -row, arrays[row]) for row in order)
    parts = list(plan_ranges(rows, method=method, range_tokens=range_tokens))
    for plan, _ in parts:
        assert [prompt.tolist() for prompt in plan.prompts] == [prompts[row] for row in plan.row_id.tolist()]
        assert plan.priority.tolist() == [-row for row in plan.row_id.tolist()]
        assert plan.group_id[0] == 0
    in_order = [sorted(plan.row_id.tolist(), key=order.index) for plan, _ in parts]
    assert [row for rows in in_order for row in rows] == order
    _, whole = plan_prompts(arrays, method=method)
    sizes = [sum(len(prompt) + ROW_TOKENS for prompt in plan.prompts) for plan, _ in parts]
    assert all(size <= range_tokens or plan.num_rows == 1 for size, (plan, _) in zip(sizes, parts, strict=True))
    if sum(sizes) <= range_tokens:
        assert len(parts) <= 1
    for plan, sharing in parts:
        num_computed = sum(group.num_tokens for group in plan.groups())
        assert num_computed == plan.num_computed_tokens == sharing.num_processed_tokens
    check_common_tokens([plan for plan, _ in parts])
    assert sum(sharing.num_best_tokens for _, sharing in parts) == whole.num_best_tokens
    num_processed = sum(sharing.num_processed_tokens for _, sharing in parts)
    assert sum(sharing.num_logical_tokens for _, sharing in parts) == whole.num_logical_tokens
    if method == "exact":
        # A cut repeats at most the chosen prefixes on one path, each as long as the beginning that was cut through.
        repeated = [plan_prompts(plan.prompts)[1].num_best_tokens - sharing.num_best_tokens for plan, sharing in parts]
        most = sum(num_tokens * (num_tokens + 1) // 2 for num_tokens in repeated)
        assert whole.num_processed_tokens <= num_processed <= whole.num_processed_tokens + most


def check_common_tokens(plans: list[Plan]) -> None:
    """Groups begin with what the plans say they have in common with the group before."""
    groups = [group for plan in plans for group in plan.groups()]
    common = [num_tokens for plan in plans for num_tokens in plan.num_common_tokens[plan.group_starts].tolist()]
    for before, group, num_tokens in zip(groups, groups[1:], common[1:], strict=False):
        assert len(group.leading_tokens) >= num_tokens
        assert before.leading_tokens[:num_tokens].tolist() == group.leading_tokens[:num_tokens].tolist()


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
    plan, sharing = plan_prompts(arrays)
    split = split_groups(plan, partition_tokens, num_answer_tokens)
    assert sorted(split.row_id.tolist()) == list(range(len(prompts)))
    groups = split.groups()
    costs = [group.num_tokens + num_answer_tokens * len(group.members) for group in groups]
    assert costs == group_costs(split, num_answer_tokens).tolist()
    assert split.num_computed_tokens == sum(group.num_tokens for group in groups)
    num_repeated_tokens = split.num_computed_tokens - sharing.num_processed_tokens
    member_costs = sharing.num_logical_tokens + num_answer_tokens * len(prompts)
    assert num_repeated_tokens <= member_costs, "splitting at most doubles what members cost"
    check_common_tokens([split])
    for group, cost in zip(groups, costs, strict=True):
        largest = max(len(member.suffix) + num_answer_tokens for member in group.members)
        if len(group.members) > 1 and 2 * len(group.prefix) <= partition_tokens:
            assert cost <= partition_tokens + largest

    priorities = np.array([*urgent, *[0] * len(groups)], np.int64)[: len(groups)]
    partitions = place_groups(group_costs(split, num_answer_tokens), priorities, partition_tokens)
    partition_costs = np.bincount(partitions, weights=costs).astype(np.int64)
    turns = sorted(range(len(groups)), key=lambda group: -priorities[group].item())
    order, common = np.argsort(partitions, kind="stable"), np.empty(len(groups), np.int64)
    common[order] = common_lens_of(split.num_common_tokens[split.group_starts], order)
    placed = np.argsort(partitions[split.group_id], kind="stable")
    check_common_tokens([replace(split, num_common_tokens=common[split.group_id]).take(placed)])
    in_turn = [int(partitions[group]) for group in turns]
    assert in_turn == sorted(in_turn), "by priority, then as the prefix tree has them"
    assert sorted(set(in_turn)) == list(range(len(partition_costs)))
    assert len(partition_costs) <= -(-sum(costs) // partition_tokens)
    for partition, cost in enumerate(partition_costs.tolist()):
        inside = [costs[group] for group in turns if partitions[group] == partition]
        assert cost <= partition_tokens + (inside[0] + inside[-1]) / 2 + 1
    highest = [int(priorities[partitions == partition].max()) for partition in range(len(partition_costs))]
    order = dispatch_order(partitions, partition_costs, priorities)
    handed = [(-highest[p], -int(partition_costs[p]), p) for p in order]
    assert handed == sorted(handed)
    assert len(handed) == len(partition_costs)


@pytest.mark.parametrize(
    ("num_groups", "num_partitions"),
    [pytest.param(5, 1, id="at least 500,000 tokens"), pytest.param(200, 25, id="each about 500,000 tokens"),
     pytest.param(1000, 32, id="a 32nd"), pytest.param(10_000, 125, id="at most 5,000,000 tokens")],
)  # fmt: skip
def test_large_plans_get_large_partitions(num_groups: int, num_partitions: int) -> None:
    costs = np.full(num_groups, 62_500, np.int64)
    partitions = place_groups(costs, np.zeros(num_groups, np.int64), "auto")
    partition_costs = np.bincount(partitions, weights=costs)
    assert len(partition_costs) == num_partitions
    assert partition_costs.max() - partition_costs.min() <= 62_500


@pytest.mark.parametrize(
    ("num_groups", "num_engines", "num_partitions"),
    [pytest.param(1000, 7, 35, id="a multiple near 32"), pytest.param(72, 8, 8, id="8 in place of 9"),
     pytest.param(40, 8, 8, id="one for each in place of 5"), pytest.param(31, 8, 4, id="each at least 250,000 tokens"),
     pytest.param(1000, 64, 64, id="more engines than 32")],
)  # fmt: skip
def test_engines_get_equal_numbers_of_large_partitions(num_groups: int, num_engines: int, num_partitions: int) -> None:
    costs = np.full(num_groups, 62_500, np.int64)
    partitions = place_groups(costs, np.zeros(num_groups, np.int64), "auto", num_engines)
    assert partitions.max() + 1 == num_partitions
    by_size = place_groups(costs, np.zeros(num_groups, np.int64), 500_000, num_engines)
    assert by_size.max() + 1 == -(-num_groups // 8), "as the user says"
