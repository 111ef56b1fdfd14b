"""Plans of prompts made by hand: what is shared, where the two methods differ, and what is refused."""

import time
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest

from engine.errors import ConfigError, RequestError
from engine.planning.group import PrefixGroup
from engine.planning.plan import SharingStats
from engine.planning.planner import PlanMethod, plan_prompts
from engine.planning.prefix_groups import plan_prefix_groups
from tests.engine.planning.groups import measure_sharing

both_methods = pytest.mark.parametrize("method", ["exact", "paper"])


class Spelling:
    """Spells prompts node by node: a named node is the same tokens wherever it appears, a leaf is unlike any other."""

    def __init__(self, **num_node_tokens: int) -> None:
        self._next_token = count()
        self._nodes = {name: self._fresh(num_tokens) for name, num_tokens in num_node_tokens.items()}

    def _fresh(self, num_tokens: int) -> list[int]:
        return [next(self._next_token) for _ in range(num_tokens)]

    def prompts(self, path: str, *, num_leaves: int = 1, num_leaf_tokens: int = 2) -> list[list[int]]:
        shared = [token for name in path for token in self._nodes[name]]
        return [shared + self._fresh(num_leaf_tokens) for _ in range(num_leaves)]


def sharing_of(groups: Sequence[PrefixGroup]) -> set[tuple[int, frozenset[int]]]:
    """(prefix tokens, requests) of each group."""
    return {
        (len(group.prefix), frozenset(index for member in group.members for index in member.request_indices))
        for group in groups
    }


@both_methods
def test_documents_with_several_queries_each(method: PlanMethod) -> None:
    spell = Spelling(a=50, b=40)
    prompts = [*spell.prompts("a", num_leaves=3), *spell.prompts("b", num_leaves=2), *spell.prompts("")]
    groups = plan_prefix_groups(prompts, method=method)
    assert sharing_of(groups) == {(50, frozenset({0, 1, 2})), (40, frozenset({3, 4})), (0, frozenset({5}))}


def test_paper_reproduces_its_figure_4() -> None:
    """Six prompts: 'b' (1 token) begins five of them, and prompts 4 and 5 have 8 tokens in common. Level by level, r is
    merged with its parent l, then both with b; sharing b alone would save 4 tokens."""
    spell = Spelling(a=3, b=1, l=2, r=5)
    prompts = [
        *spell.prompts("a"),
        *spell.prompts("b"),
        *spell.prompts("bl"),
        *spell.prompts("blr", num_leaves=2),
        *spell.prompts("b"),
    ]
    groups = plan_prefix_groups(prompts, method="paper")
    assert sharing_of(groups) == {(0, frozenset({0})), (1, frozenset({1, 2, 5})), (8, frozenset({3, 4}))}
    sharing = measure_sharing(groups)
    assert sharing.num_logical_tokens - sharing.num_processed_tokens == 8 + 2


def test_paper_forks_only_where_the_gain_exceeds_the_penalty() -> None:
    spell = Spelling(a=10, b=10, c=11)
    prompts = [
        *spell.prompts("a", num_leaves=2),
        *spell.prompts("ab", num_leaves=2),
        *spell.prompts("ac", num_leaves=2),
    ]
    groups = plan_prefix_groups(prompts, method="paper")
    assert sharing_of(groups) == {(10, frozenset({0, 1, 2, 3})), (21, frozenset({4, 5}))}


def test_paper_leaves_that_stay_behind_share_nothing_deeper() -> None:
    """w is forked off u (10 > 3) but stays in p (13 <= 20), whereas u leaves p (7 * 3 > 20): w's leaves share p's 20
    tokens, although u's 23 would fit them."""
    spell = Spelling(p=20, u=3, w=10)
    prompts = [*spell.prompts("p"), *spell.prompts("pu", num_leaves=8), *spell.prompts("puw", num_leaves=2)]
    groups = plan_prefix_groups(prompts, method="paper")
    assert sharing_of(groups) == {(20, frozenset({0, 9, 10})), (23, frozenset(range(1, 9)))}


@pytest.mark.parametrize("method", ["exact", "paper"])
def test_a_prefix_shorter_than_a_block_is_not_planned(method: Any) -> None:
    """The schedule computes it with each suffix."""
    prompts = Spelling(a=15, b=16).prompts("a", num_leaves=3) + Spelling(a=15, b=16).prompts("b", num_leaves=3)
    groups = plan_prefix_groups(prompts, method=method, block_size=16)
    assert sorted(len(group.prefix) for group in groups) == [0, 0, 0, 16]


def test_exact_sees_what_comparing_two_levels_cannot() -> None:
    """Neither b nor c is worth a second copy of a (6 <= 10), but both together leave a without users."""
    spell = Spelling(a=10, b=6, c=6)
    prompts = [*spell.prompts("ab", num_leaves=2), *spell.prompts("ac", num_leaves=2)]
    exact, paper = (plan_prefix_groups(prompts, method=method) for method in ("exact", "paper"))
    assert sharing_of(paper) == {(10, frozenset({0, 1, 2, 3}))}
    assert sharing_of(exact) == {(16, frozenset({0, 1})), (16, frozenset({2, 3}))}
    assert measure_sharing(exact).num_processed_tokens == measure_sharing(paper).num_processed_tokens - 2


@both_methods
def test_identical_prompts_are_one_member(method: PlanMethod) -> None:
    (group,) = plan_prefix_groups([[5, 6, 7]] * 3, method=method)
    assert len(group.prefix) == 0
    (member,) = group.members
    assert member.request_indices == (0, 1, 2)
    assert member.suffix.tolist() == [5, 6, 7]


def test_identical_prompts_do_not_count_as_sharers_of_a_prefix() -> None:
    """Three copies of one prompt below 'b' are one leaf: with two leaves b saves 6, less than a's 10."""
    spell = Spelling(a=10, b=6)
    one, other, top = spell.prompts("ab") + spell.prompts("ab") + spell.prompts("a")
    groups = plan_prefix_groups([one, one, one, other, top])
    assert sharing_of(groups) == {(10, frozenset(range(5)))}
    assert measure_sharing(groups).num_processed_tokens == 10 + 8 + 8 + 2


@both_methods
def test_a_prompt_that_begins_another_keeps_its_last_token(method: PlanMethod) -> None:
    (group,) = plan_prefix_groups([[1, 2, 3], [1, 2, 3, 4, 5]], method=method)
    assert group.prefix.tolist() == [1, 2]
    assert [member.suffix.tolist() for member in group.members] == [[3], [3, 4, 5]]


@both_methods
def test_no_prompt_and_one_prompt(method: PlanMethod) -> None:
    assert plan_prefix_groups([], method=method) == []
    (group,) = plan_prefix_groups([[9]], method=method)
    assert (len(group.prefix), group.members[0].suffix.tolist()) == (0, [9])


@both_methods
def test_prompts_that_share_nothing_are_groups_of_one(method: PlanMethod) -> None:
    groups = plan_prefix_groups([[1, 2], [3, 4], [5]], method=method)
    assert sharing_of(groups) == {(0, frozenset({i})) for i in range(3)}


@pytest.mark.parametrize(
    "as_type",
    [
        list,
        tuple,
        lambda tokens: np.array(tokens, dtype=np.int32),
        lambda tokens: np.array(tokens, dtype=np.int64),
        lambda tokens: np.array(tokens, dtype=np.uint16),
        lambda tokens: np.repeat(np.array(tokens, dtype=np.int32), 2)[::2],
        lambda tokens: [np.int64(token) for token in tokens],
        lambda tokens: range(tokens[0], tokens[-1] + 1),
    ],
    ids=["list", "tuple", "int32", "int64", "uint16", "strided", "numpy integers", "range"],
)
def test_any_sequence_of_integers_is_a_prompt(as_type: type[list[int]]) -> None:
    (group,) = plan_prefix_groups([as_type([1, 2, 3]), as_type([1, 2, 3, 4])])
    assert group.prefix.dtype == group.members[0].suffix.dtype == np.int32
    assert group.prefix.tolist() == [1, 2]
    assert [member.suffix.tolist() for member in group.members] == [[3], [3, 4]]


def test_int32_arrays_are_used_where_they_lie() -> None:
    prompts = [np.array([1, 2, 3], dtype=np.int32), np.array([1, 2, 4], dtype=np.int32)]
    (group,) = plan_prefix_groups(prompts)
    assert any(np.shares_memory(group.prefix, prompt) for prompt in prompts)
    assert np.shares_memory(group.members[0].suffix, prompts[group.members[0].request_indices[0]])


@pytest.mark.parametrize(
    ("sequence", "why"),
    [
        ([], "at least one token, got none"),
        (np.empty(0, dtype=np.int32), "at least one token, got none"),
        ([1, 2.5], "not an integer"),
        (["a"], "not an integer"),
        ([1, 2**31], "fit int32"),
        (np.array([1, 2**31]), "from 1 to 2147483648"),
        (np.array([2**32 - 1], dtype=np.uint32), "from 4294967295 to 4294967295"),
        (np.array([1.0]), "array of float64"),
        (np.array([[1], [2]]), r"shape \(2, 1\)"),
        (None, "NoneType"),
        (7, "int"),
    ],
)
def test_a_sequence_that_is_no_prompt_is_named(sequence: object, why: str) -> None:
    with pytest.raises(RequestError, match=f"sequence 1: .*{why}"):
        plan_prefix_groups([[1], sequence])  # type: ignore[list-item]


def test_what_is_no_list_of_prompts_is_named() -> None:
    with pytest.raises(RequestError, match="sequences must be lists of token ids, got None"):
        plan_prefix_groups(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("block_size", [0, -1, 1.5, True, "32"])
def test_a_block_size_out_of_range_is_refused(block_size: Any) -> None:
    with pytest.raises(ConfigError, match=f"block_size must be None or a positive whole number, got {block_size!r}"):
        plan_prefix_groups([[1]], block_size=block_size)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ConfigError, match="one of 'exact', 'paper', 'none', got 'greedy'"):
        plan_prefix_groups([[1]], method="greedy")  # type: ignore[arg-type]


@both_methods
def test_the_columns_of_a_plan(method: PlanMethod) -> None:
    prompts = [np.array(tokens, dtype=np.int32) for tokens in ([1, 2, 3], [7, 7], [1, 2, 4], [1, 2, 3])]
    plan, sharing = plan_prompts(prompts, method=method)
    assert len(plan.group_starts) == 2
    assert plan.row_id.tolist() == [0, 3, 2, 1]
    assert [prompt.tolist() for prompt in plan.prompts] == [prompts[row].tolist() for row in plan.row_id]
    assert plan.group_id.tolist() == [0, 0, 0, 1]
    assert plan.member_id.tolist() == [0, 0, 1, 0]
    assert plan.num_prefix_tokens.tolist() == [2, 2, 2, 0]
    assert plan.num_common_tokens.tolist() == plan.partition.tolist() == plan.priority.tolist() == [0, 0, 0, 0]
    assert plan.row_id.dtype == plan.group_id.dtype == plan.member_id.dtype == plan.priority.dtype == np.int64
    assert plan.num_prefix_tokens.dtype == plan.num_common_tokens.dtype == plan.partition.dtype == np.int32
    assert sharing == SharingStats(num_logical_tokens=11, num_processed_tokens=6, num_best_tokens=6)
    assert sharing.token_saving_ratio == pytest.approx(5 / 11)


def test_the_plan_of_no_prompts() -> None:
    plan, sharing = plan_prompts([])
    assert (plan.num_rows, len(plan.group_starts), plan.num_computed_tokens, plan.groups()) == (0, 0, 0, [])
    assert sharing.token_saving_ratio == sharing.best_token_saving_ratio == 0.0
    assert plan.select(np.zeros(0, dtype=bool)).num_rows == 0


def test_what_groups_have_in_common_is_told_of_the_groups_that_are_left() -> None:
    """Four documents below an instruction; the first two begin alike further on."""
    instruction, first_two = [*range(10)], [20, 21]
    documents = [[*first_two, *[22] * 20], [*first_two, *[23] * 20], [30] * 20, [40] * 20]
    prompts = [np.array([*instruction, *document, 50 + row], np.int32) for document in documents for row in range(3)]
    plan, _ = plan_prompts(prompts)
    assert plan.num_common_tokens[plan.group_starts].tolist() == [0, 12, 10, 10]
    for left, common in (([0, 1], [0, 12]), ([0, 2], [0, 10]), ([1, 3], [0, 10]), ([3], [0]), ([], [])):
        some = plan.select(np.isin(plan.group_id, left))
        assert some.num_common_tokens[some.group_starts].tolist() == common
        assert some.num_common_block_tokens(4) == sum(length // 4 * 4 for length in common)
    first, second, *others = plan.groups()
    assert first.common is second.common is not None
    assert (first.common.num_tokens, first.common.parent) == (12, others[0].common)
    assert others[0].common is others[1].common is not None
    assert (others[0].common.num_tokens, others[0].common.parent) == (10, None)


@both_methods
def test_a_chain_of_two_thousand_nodes(method: PlanMethod) -> None:
    """Prompt i leaves the common beginning after i tokens: no recursion limit, no time that grows with depth squared
    per node. The least cost of a chain follows from choosing its cut points from the deepest on."""
    num_prompts = 2000
    prompts = [np.append(np.zeros(i, dtype=np.int32), np.int32(1)) for i in range(num_prompts)]
    started = time.perf_counter()
    groups = plan_prefix_groups(prompts, method=method)
    assert time.perf_counter() - started < 10
    sharing = measure_sharing(groups)
    saved = np.zeros(num_prompts + 1, dtype=np.int64)  # most tokens saved from a cut at depth d on down
    for depth in range(num_prompts - 1, -1, -1):
        ends = np.arange(depth + 1, num_prompts + 1)
        saved[depth] = (depth * (ends - depth - 1) + saved[ends]).max()
    least = sharing.num_logical_tokens - int(saved[0])
    if method == "exact":
        assert sharing.num_processed_tokens == least
    else:
        assert least <= sharing.num_processed_tokens < sharing.num_logical_tokens
