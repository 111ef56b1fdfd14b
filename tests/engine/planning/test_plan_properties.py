"""Plans of random prompts against definitions written out in the slowest, plainest way."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.planning.plan import PlanMethod, plan_prefix_groups, plan_token_table
from engine.planning.prefix_groups import PrefixGroup, rebuild_groups
from engine.planning.shared_runs import plan_shared_runs
from engine.planning.sharing_stats import measure_sharing

Prompt = list[int]
both_methods = pytest.mark.parametrize("method", ["exact", "paper"])

# Stretches of equal tokens: few symbols and uneven lengths, so that deep, uneven trees are common.
stretches = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), min_size=1, max_size=4)
prompts_st = stretches.map(lambda parts: [token for token, length in parts for _ in range(length)])


def batches(max_size: int) -> st.SearchStrategy[list[Prompt]]:
    return st.lists(prompts_st | st.lists(st.integers(0, 1), min_size=1, max_size=6), max_size=max_size)


def prompt_of(group: PrefixGroup, index: int) -> Prompt:
    return [*group.prefix.tolist(), *group.members[index].suffix.tolist()]


def shareable(group: PrefixGroup) -> Prompt:
    alone = len(group.prefix) == 0 and len(group.members) == 1
    tokens: Prompt = (group.members[0].suffix[:-1] if alone else group.prefix).tolist()
    return tokens


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
def test_a_stored_plan_and_any_part_of_it_rebuild_the_groups(
    method: PlanMethod, sequences: list[Prompt], data: st.DataObject
) -> None:
    arrays = [np.array(prompt, dtype=np.int32) for prompt in sequences]
    values = np.concatenate([np.empty(0, dtype=np.int32), *arrays])
    table = plan_token_table(values, np.cumsum([0, *map(len, sequences)]), method=method)
    groups = plan_prefix_groups(sequences, method=method)
    columns = (table.group_id, table.member_id, table.num_prefix_tokens)
    assert table.num_groups == len(groups)
    assert described(rebuild_groups(arrays, *columns), sequences) == described(groups, sequences)

    wanted = data.draw(st.sets(st.integers(0, max(table.num_groups - 1, 0))))
    rows = [row for row in data.draw(st.permutations(range(len(arrays)))) if table.group_id[row] in wanted]
    part = rebuild_groups([arrays[row] for row in rows], *(column[rows] for column in columns))
    expected = described([groups[i] for i in sorted(wanted) if i < len(groups)], sequences)
    assert described(part, [sequences[row] for row in rows]) == expected


@both_methods
@given(sequences=batches(max_size=20), block_size=st.integers(1, 5))
def test_statistics_count_what_they_say(method: PlanMethod, sequences: list[Prompt], block_size: int) -> None:
    groups = plan_prefix_groups(sequences, method=method)
    runs = plan_shared_runs(groups, block_size)
    values = np.array([token for prompt in sequences for token in prompt], dtype=np.int32)
    table = plan_token_table(values, np.cumsum([0, *map(len, sequences)]), method=method)
    assert measure_sharing(groups) == table.sharing
    distinct = {tuple(prompt) for prompt in sequences}
    beginnings = {prompt[:depth] for prompt in distinct for depth in range(1, len(prompt))}
    assert table.sharing.num_logical_tokens == sum(map(len, sequences))
    assert table.sharing.num_processed_tokens == num_tokens(groups)
    assert table.sharing.num_best_tokens == len(beginnings) + len(distinct)
    with_runs = measure_sharing(groups, runs)
    assert with_runs.num_processed_tokens == num_tokens(groups) - runs.num_saved_tokens
    assert table.sharing.num_best_tokens <= with_runs.num_processed_tokens <= table.sharing.num_processed_tokens
    assert 0 <= with_runs.token_saving_ratio <= with_runs.best_token_saving_ratio < 1


@both_methods
@given(sequences=batches(max_size=20), block_size=st.integers(1, 5))
def test_runs_are_exactly_the_full_blocks_that_groups_share(
    method: PlanMethod, sequences: list[Prompt], block_size: int
) -> None:
    groups = plan_prefix_groups(sequences, method=method)
    forest = plan_shared_runs(groups, block_size)
    # A block is known by all tokens up to its end.
    block_users = Counter(
        tuple(tokens[:end])
        for tokens in map(shareable, groups)
        for end in range(block_size, len(tokens) + 1, block_size)
    )
    run_users: Counter[int] = Counter()
    for i, group in enumerate(groups):
        tokens, path = shareable(group), forest.path(i)
        num_shared_blocks = sum(
            block_users[tuple(tokens[:end])] > 1 for end in range(block_size, len(tokens) + 1, block_size)
        )
        assert forest.num_covered_tokens(i) == num_shared_blocks * block_size
        assert all(forest.num_covered_tokens(i) < len(prompt_of(group, m)) for m in range(len(group.members)))
        assert [token for run in path for token in run.token_ids.tolist()] == tokens[: forest.num_covered_tokens(i)]
        run_users.update(run.index for run in path)
    for position, run in enumerate(forest.runs):
        assert run.index == position
        assert -1 <= run.parent < run.index
        assert run.start == (forest.runs[run.parent].end if run.parent >= 0 else 0)
        assert run.start < run.end
        assert run.start % block_size == run.end % block_size == 0
        assert len(run.token_ids) == run.end - run.start
        assert run.num_groups == run_users[run.index] >= 2
    assert forest.num_saved_tokens == sum((users - 1) * block_size for users in block_users.values())
