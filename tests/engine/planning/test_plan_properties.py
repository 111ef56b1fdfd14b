"""Plans of random prompts against definitions written out in the slowest, plainest way."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.planning.choose_prefixes import PlanMethod
from engine.planning.plan import PrefixGroup
from engine.planning.planner import plan_prompts
from engine.planning.prefix_groups import plan_prefix_groups
from tests.engine.planning.groups import measure_sharing

Prompt = list[int]
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


def least_tokens_of_any_grouping(sequences: Sequence[Prompt]) -> int:
    """Over all ways to split the distinct prompts into groups: a group computes its longest common prefix once."""

    def group_tokens(group: list[Prompt]) -> int:
        columns = zip(*(prompt[:-1] for prompt in group), strict=False)
        num_shared = len(list(takewhile(lambda column: len(set(column)) == 1, columns))) if len(group) > 1 else 0
        return num_shared + sum(len(prompt) - num_shared for prompt in group)

    distinct = [list(prompt) for prompt in {tuple(prompt) for prompt in sequences}]
    return min(sum(map(group_tokens, partition)) for partition in set_partitions(distinct))


def least_tokens_of_any_choice(sequences: Sequence[Prompt]) -> int:
    """The same by plain recursion over an uncompressed trie, which reaches batches too large to enumerate."""
    distinct = {tuple(prompt) for prompt in sequences}
    below: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    ends = Counter(prompt[:-1] for prompt in distinct)
    for prompt in distinct:
        for depth in range(len(prompt) - 1):
            below.setdefault(prompt[:depth], set()).add(prompt[: depth + 1])

    def cost(node: tuple[int, ...], nearest: int) -> int:
        children = below.get(node, ())
        kept = sum(cost(child, nearest) for child in children) - ends[node] * nearest
        chosen = len(node) + sum(cost(child, len(node)) for child in children) - ends[node] * len(node)
        return min(kept, chosen)

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


@given(sequences=batches(max_size=7))
def test_exact_equals_the_best_of_all_groupings(sequences: list[Prompt]) -> None:
    assert num_tokens(plan_prefix_groups(sequences)) == least_tokens_of_any_grouping(sequences)


@given(sequences=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=8, max_size=40))
def test_exact_equals_plain_recursion_on_bushy_trees(sequences: list[Prompt]) -> None:
    assert num_tokens(plan_prefix_groups(sequences)) == least_tokens_of_any_choice(sequences)


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
    assert plan.num_groups == len(groups)
    assert described(plan.groups(), sequences) == described(groups, sequences)

    wanted = sorted(data.draw(st.sets(st.integers(0, max(plan.num_groups - 1, 0)))))
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
