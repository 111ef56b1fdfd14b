"""Plans of random prompts against definitions written out in the slowest, plainest way."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product, takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.planning.group import PrefixGroup
from engine.planning.planner import PlanMethod, plan_prompts
from engine.planning.prefix_groups import plan_prefix_groups
from engine.request import Request
from engine.scheduling.policies.sharing import schedule_groups
from tests.engine.planning.groups import measure_sharing

Prompt = list[int]
BLOCK_SIZES = st.none() | st.integers(1, 6)
both_methods = pytest.mark.parametrize("method", ["exact", "paper"])

# Stretches of equal tokens: few symbols and uneven lengths, so that deep, uneven trees are common.
stretches = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), min_size=1, max_size=4)
prompts_st = stretches.map(lambda parts: [token for token, length in parts for _ in range(length)])


def batches(max_size: int) -> st.SearchStrategy[list[Prompt]]:
    return st.lists(prompts_st | st.lists(st.integers(0, 1), min_size=1, max_size=6), max_size=max_size)


def prompt_of(group: PrefixGroup, index: int) -> Prompt:
    return [*group.prefix.tolist(), *group.members[index].suffix.tolist()]


def as_arrays(sequences: Sequence[Prompt]) -> list[np.ndarray]:
    return [np.array(prompt, dtype=np.int32) for prompt in sequences]


def num_tokens(groups: Sequence[PrefixGroup]) -> int:
    return sum(group.num_tokens for group in groups)


def described(groups: Sequence[PrefixGroup], sequences: Sequence[Prompt]) -> list[object]:
    """A plan without positions: each member with the prompts of its requests."""
    return [
        (
            group.prefix.tolist(),
            [(member.suffix.tolist(), [sequences[i] for i in member.request_indices]) for member in group.members],
        )
        for group in groups
    ]


def set_partitions(items: list[Prompt]) -> Iterator[list[list[Prompt]]]:
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for partition in set_partitions(rest):
        yield [[first], *partition]
        for i in range(len(partition)):
            yield [*partition[:i], [first, *partition[i]], *partition[i + 1 :]]


def least_tokens_of_any_grouping(sequences: Sequence[Prompt], block_size: int | None) -> int:
    """Over all ways to split the distinct prompts into groups: a group computes its longest common prefix once, and
    full blocks that several groups or prompts planned alone begin with are computed once."""

    def grouping_tokens(partition: list[list[Prompt]]) -> int:
        blocks: set[tuple[int, ...]] = set()
        num_tokens = 0
        for group in partition:
            columns = zip(*(prompt[:-1] for prompt in group), strict=False)
            num_leading = len(list(takewhile(lambda column: len(set(column)) == 1, columns)))
            if block_size is not None:
                ends = range(block_size, num_leading + 1, block_size)
                blocks |= {tuple(group[0][:end]) for end in ends}
                num_tokens -= len(ends) * block_size
            num_shared = num_leading if num_leading >= (block_size or 1) else 0
            num_tokens += num_shared + sum(len(prompt) - num_shared for prompt in group)
        return num_tokens + len(blocks) * (block_size or 0)

    distinct = [list(prompt) for prompt in {tuple(prompt) for prompt in sequences}]
    return min(map(grouping_tokens, set_partitions(distinct)))


def least_tokens_of_any_choice(sequences: Sequence[Prompt], block_size: int | None) -> int:
    """The same by plain recursion over an uncompressed trie, which reaches batches too large to enumerate."""
    distinct = {tuple(prompt) for prompt in sequences}
    below: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    ends = Counter(prompt[:-1] for prompt in distinct)
    for prompt in distinct:
        for depth in range(len(prompt) - 1):
            below.setdefault(prompt[:depth], set()).add(prompt[: depth + 1])

    @cache
    def count_leaves(node: tuple[int, ...]) -> int:
        return ends[node] + sum(map(count_leaves, below.get(node, ())))

    @cache
    def cost(node: tuple[int, ...], nearest: int) -> int:
        children, depth = below.get(node, ()), len(node)
        whole = depth - depth % block_size if block_size else 0
        block = block_size if block_size and depth == whole > 0 else 0
        kept = block + sum(cost(child, nearest) for child in children) - ends[node] * max(nearest, whole)
        costs = [kept, -nearest * count_leaves(node)]
        if depth >= (block_size or 1):
            under = sum(cost(child, depth) for child in children) - ends[node] * depth
            costs.append(block + depth - whole + under)
        return min(costs)

    return sum(map(len, distinct)) + cost((), 0)


@both_methods
@given(sequences=batches(max_size=30))
def test_every_token_is_planned_exactly_once(method: PlanMethod, sequences: list[Prompt]) -> None:
    groups = plan_prefix_groups(sequences, method=method)
    planned = [index for group in groups for member in group.members for index in member.request_indices]
    assert sorted(planned) == list(range(len(sequences)))
    for group in groups:
        assert (len(group.prefix) > 0) == (len(group.members) > 1)
        for i, member in enumerate(group.members):
            assert len(member.suffix) > 0
            assert list(member.request_indices) == sorted(member.request_indices)
            for index in member.request_indices:
                assert prompt_of(group, i) == sequences[index]
    num_distinct = len({tuple(prompt) for prompt in sequences})
    assert sum(len(group.members) for group in groups) == num_distinct


def num_scheduled_tokens(sequences: Sequence[Prompt], block_size: int | None) -> int:
    """Tokens of the prefix nodes and the sequences that the schedule makes of an exact plan."""
    groups = plan_prefix_groups(sequences, block_size=block_size)
    requests = [Request(request_id=str(number), token_ids=prompt) for number, prompt in enumerate(sequences)]
    config = EngineConfig(block_size=block_size or 1, sharing="path" if block_size else "group")
    scheduled = schedule_groups(requests, groups, (), config)
    nodes = {node for group in scheduled if group[0].node is not None for node in group[0].node.chain()}
    suffixes = [sequence.num_suffix for group in scheduled for sequence in group]
    return sum(len(node.token_ids) for node in nodes) + sum(suffixes)


@given(sequences=batches(max_size=7), block_size=BLOCK_SIZES)
def test_exact_equals_the_best_of_all_groupings(sequences: list[Prompt], block_size: int | None) -> None:
    assert num_scheduled_tokens(sequences, block_size) == least_tokens_of_any_grouping(sequences, block_size)


@given(
    sequences=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=8, max_size=40),
    block_size=BLOCK_SIZES,
)
def test_exact_equals_plain_recursion_on_bushy_trees(sequences: list[Prompt], block_size: int | None) -> None:
    assert num_scheduled_tokens(sequences, block_size) == least_tokens_of_any_choice(sequences, block_size)


@given(
    lengths=st.lists(st.integers(0, 12), min_size=2, max_size=4),
    branches=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    block_size=BLOCK_SIZES,
)
def test_exact_is_optimal_on_documents_instructions_queries(
    lengths: list[int], branches: list[int], block_size: int | None
) -> None:
    """Two to four levels, each part of one length: with blocks of one token, every beginning is computed once."""
    ways = product(*(range(count) for count in branches[: len(lengths)]))
    sequences = [
        [*(part for length, part in zip(lengths, way, strict=True) for _ in range(length + 1)), 9] for way in ways
    ]
    least = least_tokens_of_any_choice(sequences, block_size)
    assert num_scheduled_tokens(sequences, block_size) == least
    _, sharing = plan_prompts(as_arrays(sequences), block_size=block_size)
    assert sharing.num_processed_tokens == least
    assert sharing.num_best_tokens <= least
    if block_size == 1:
        assert sharing.num_best_tokens == least


@given(sequences=batches(max_size=20), block_size=st.integers(1, 6))
def test_what_groups_share_changes_a_plan_only_where_it_saves_tokens(sequences: list[Prompt], block_size: int) -> None:
    """Prefixes shorter than a block save nothing."""
    apart, _ = plan_prompts(as_arrays(sequences))
    plan, sharing = plan_prompts(as_arrays(sequences), block_size=block_size)
    num_apart = apart.num_computed_tokens - apart.num_common_block_tokens(block_size)
    lens = apart.num_prefix_tokens
    if np.all((lens == 0) | (lens >= block_size)):
        assert sharing.num_processed_tokens <= num_apart
        if sharing.num_processed_tokens == num_apart:
            assert plan.group_id.tolist() == apart.group_id.tolist()
            assert plan.num_prefix_tokens.tolist() == apart.num_prefix_tokens.tolist()


@given(sequences=batches(max_size=30))
def test_exact_is_never_worse_than_paper_nor_better_than_the_best(sequences: list[Prompt]) -> None:
    exact, paper = (plan_prefix_groups(sequences, method=method) for method in ("exact", "paper"))
    first_level = Counter(prompt[0] for prompt in {tuple(prompt) for prompt in sequences} if len(prompt) > 1)
    plain = sum(map(len, {tuple(prompt) for prompt in sequences})) - sum(n - 1 for n in first_level.values())
    assert measure_sharing(exact).num_best_tokens <= num_tokens(exact) <= num_tokens(paper) <= plain


@both_methods
@given(data=st.data(), sequences=batches(max_size=20))
def test_input_order_does_not_matter(method: PlanMethod, data: st.DataObject, sequences: list[Prompt]) -> None:
    shuffled = data.draw(st.permutations(sequences))
    before = described(plan_prefix_groups(sequences, method=method), sequences)
    assert described(plan_prefix_groups(shuffled, method=method), shuffled) == before


@both_methods
@given(sequences=batches(max_size=20), data=st.data())
def test_any_groups_of_a_plan_are_the_groups_of_those_rows(
    method: PlanMethod, sequences: list[Prompt], data: st.DataObject
) -> None:
    plan, _ = plan_prompts(as_arrays(sequences), method=method)
    groups = plan_prefix_groups(sequences, method=method)
    assert len(plan.group_starts) == len(groups)
    assert described(plan.groups(), sequences) == described(groups, sequences)

    wanted = sorted(data.draw(st.sets(st.integers(0, max(len(plan.group_starts) - 1, 0)))))
    part = plan.select(np.isin(plan.group_id, wanted))
    expected = described([groups[i] for i in wanted if i < len(groups)], sequences)
    assert described(part.groups(), [sequences[row] for row in sorted(part.row_id.tolist())]) == expected


@both_methods
@given(sequences=batches(max_size=20), block_size=st.integers(1, 5))
def test_statistics_count_what_they_say(method: PlanMethod, sequences: list[Prompt], block_size: int) -> None:
    groups = plan_prefix_groups(sequences, method=method)
    plan, sharing = plan_prompts(as_arrays(sequences), method=method)
    assert measure_sharing(groups) == sharing
    distinct = {tuple(prompt) for prompt in sequences}
    beginnings = {prompt[:depth] for prompt in distinct for depth in range(1, len(prompt))}
    assert sharing.num_logical_tokens == sum(map(len, sequences))
    assert sharing.num_processed_tokens == num_tokens(groups) == plan.num_computed_tokens
    assert sharing.num_best_tokens == len(beginnings) + len(distinct)
    with_blocks = replace(
        sharing, num_processed_tokens=sharing.num_processed_tokens - plan.num_common_block_tokens(block_size)
    )
    assert sharing.num_best_tokens <= with_blocks.num_processed_tokens <= sharing.num_processed_tokens
    assert 0 <= with_blocks.token_saving_ratio <= with_blocks.best_token_saving_ratio < 1
