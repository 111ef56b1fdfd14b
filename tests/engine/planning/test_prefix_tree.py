"""The prefix tree on cases small enough to draw."""

from collections.abc import Sequence

import numpy as np
import pytest

from engine.planning.prefix_tree import PrefixTree, build_prefix_tree


def tree_of(*prompts: Sequence[int]) -> PrefixTree:
    return build_prefix_tree([np.array(prompt, dtype=np.int32) for prompt in prompts])


def nodes_of(tree: PrefixTree, *prompts: Sequence[int]) -> dict[tuple[int, ...], set[tuple[int, ...]]]:
    """Beginning -> the distinct prompts below it, the root left out."""
    leaf_prompts = [tuple(prompts[row]) for row in tree.rows[tree.row_starts[:-1]]]
    nodes = {}
    for depth, start, end in zip(tree.node_depths[1:], tree.node_leaf_starts[1:], tree.node_leaf_ends[1:], strict=True):
        below = leaf_prompts[start:end]
        assert {prompt[:depth] for prompt in below} == {below[0][:depth]}
        nodes[below[0][:depth]] = set(below)
    return nodes


def test_two_levels() -> None:
    prompts = [(1, 2, 3, 4), (1, 2, 5, 6), (1, 2, 5, 7), (8, 9)]
    tree = tree_of(*prompts)
    assert nodes_of(tree, *prompts) == {
        (1, 2): {(1, 2, 3, 4), (1, 2, 5, 6), (1, 2, 5, 7)},
        (1, 2, 5): {(1, 2, 5, 6), (1, 2, 5, 7)},
    }
    assert tree.num_trie_tokens == len([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert tree.num_logical_tokens == 14


def test_nodes_are_in_preorder_and_leaf_ranges_nest() -> None:
    tree = tree_of((3, 1, 1), (3, 1, 2), (3, 2, 1), (3, 2, 2), (4, 1), (4, 2), (5,))
    assert tree.node_parents[0] == -1
    assert (tree.node_leaf_starts[0], tree.node_leaf_ends[0]) == (0, 7)
    for node, parent in enumerate(tree.node_parents[1:], start=1):
        assert parent < node
        assert tree.node_depths[parent] < tree.node_depths[node]
        assert tree.node_leaf_starts[parent] <= tree.node_leaf_starts[node]
        assert tree.node_leaf_ends[node] <= tree.node_leaf_ends[parent]


def test_a_node_found_late_lies_between_nodes_found_early() -> None:
    prompts = [(1, 1, 1, 1, 2), (1, 1, 1, 1, 3), (1, 1, 2, 1), (2, 2)]
    assert set(nodes_of(tree_of(*prompts), *prompts)) == {(1, 1), (1, 1, 1, 1)}


def test_identical_prompts_are_one_leaf_with_several_rows() -> None:
    tree = tree_of((7, 8), (1, 2), (7, 8), (7, 8))
    assert tree.num_leaves == 2
    owners = [tree.rows[start:end].tolist() for start, end in zip(tree.row_starts, tree.row_starts[1:], strict=False)]
    assert sorted(owners) == [[0, 2, 3], [1]]
    assert tree.num_nodes == 1
    assert tree.num_trie_tokens == 4


@pytest.mark.parametrize("longer", [(1, 2, 3), (1, 2, 0), (1, 2, -1), (1, 2, 256)])
def test_the_last_token_of_a_prompt_that_begins_another_is_its_own(longer: tuple[int, ...]) -> None:
    prompts = [longer, (1, 2)]
    tree = tree_of(*prompts)
    assert set(nodes_of(tree, *prompts)) == {(1,)}
    assert tree.num_trie_tokens == 1 + 1 + 2


def test_a_short_prompt_does_not_cut_what_longer_ones_share() -> None:
    prompts = [(1, 2, 3, 4), (1, 2), (1, 2, 3, 5), (1, 2, 3)]
    tree = tree_of(*prompts)
    assert nodes_of(tree, *prompts) == {
        (1,): set(prompts),
        (1, 2): {(1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3)},
        (1, 2, 3): {(1, 2, 3, 4), (1, 2, 3, 5)},
    }


def test_prompts_of_one_token_share_nothing() -> None:
    tree = tree_of((1,), (2,), (1,))
    assert (tree.num_leaves, tree.num_nodes, tree.num_trie_tokens) == (2, 1, 2)


def test_one_prompt_and_none() -> None:
    one = tree_of((4, 5, 6))
    assert (one.num_leaves, one.num_nodes, one.num_trie_tokens) == (1, 1, 3)
    none = tree_of()
    assert (none.num_leaves, none.num_nodes, none.num_trie_tokens, none.num_logical_tokens) == (0, 1, 0, 0)
    assert none.node_leaf_ends.tolist() == [0]


def test_tokens_that_differ_in_a_high_byte_only() -> None:
    """The order is that of bytes, little-endian or not; a common byte is not a common token."""
    prompts = [(1, 5, 9), (257, 5, 9), (1 << 24, 5, 9), (1, 261, 9), (1, 5, 10)]
    assert set(nodes_of(tree_of(*prompts), *prompts)) == {(1,), (1, 5)}


def test_the_tree_does_not_depend_on_input_order() -> None:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 3, rng.integers(1, 12)).astype(np.int32) for _ in range(200)]
    tree = build_prefix_tree(prompts)
    shuffled = build_prefix_tree([prompts[i] for i in rng.permutation(200)])
    for name in ("row_starts", "leaf_lens", "leaf_nodes", "node_depths", "node_parents", "node_leaf_ends"):
        np.testing.assert_array_equal(getattr(tree, name), getattr(shuffled, name), err_msg=name)
