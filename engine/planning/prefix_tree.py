"""The compact prefix tree of a whole batch of prompts, as flat arrays (BatchLLM section 4.2).

Prompts are sorted, neighbours are compared, and one stack pass over their common prefix lengths makes the tree.
Cost: the sort, which compares bytes in memory, then linear in tokens; no Python code runs once per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, starmap

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]
IndexArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeNodes:
    """Nodes of a prefix tree in preorder, so a parent has a smaller index than its children; node 0 is the root.

    Attributes:
        leaf_nodes: int64 ``[L]``, the deepest node above each leaf.
        node_depths: int64 ``[N]``, tokens from the root; greater than the parent's.
        node_parents: int64 ``[N]``; -1 for the root.
        node_leaf_starts, node_leaf_ends: int64 ``[N]``, the first leaf below each node, and one past the last.
    """

    leaf_nodes: IndexArray
    node_depths: IndexArray
    node_parents: IndexArray
    node_leaf_starts: IndexArray
    node_leaf_ends: IndexArray


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefixTree(TreeNodes):
    """The prefixes that prompts share. A node is a prefix after which at least two different prompts diverge.

    Leaves are the L distinct prompts in the order of their token bytes, so the leaves below a node are consecutive. The
    root is the empty prefix. The last token of a prompt is always computed, for its logits, and never part of a node: a
    leaf is longer than any node above it.

    Attributes:
        rows: int64 ``[num_rows]``, positions in the input, leaf by leaf, ascending within a leaf.
        row_starts: int64 ``[L + 1]`` into rows; a leaf owns several rows where prompts are identical.
        leaf_lens: int64 ``[L]``, tokens in each distinct prompt.
        leaf_common_lens: int64 ``[L]``, tokens that each leaf shares with the next one; 0 for the last leaf.
    """

    rows: IndexArray
    row_starts: IndexArray
    leaf_lens: IndexArray
    leaf_common_lens: IndexArray

    @property
    def num_leaves(self) -> int:
        return len(self.leaf_lens)

    @property
    def num_nodes(self) -> int:
        return len(self.node_depths)

    @property
    def num_logical_tokens(self) -> int:
        """Tokens of all prompts, identical ones counted each time."""
        return int(self.leaf_lens @ np.diff(self.row_starts))

    @property
    def num_trie_tokens(self) -> int:
        """The fewest tokens that any sharing computes: those of every node and every leaf once."""
        node_tokens = self.node_depths[1:] - self.node_depths[self.node_parents[1:]]
        return int(node_tokens.sum() + (self.leaf_lens - self.node_depths[self.leaf_nodes]).sum())


def common_prefix_len(left: TokenArray, right: TokenArray) -> int:
    """Number of leading tokens that two prompts, neither empty, have in common."""
    num_comparable = min(len(left), len(right))
    differs = left[:num_comparable] != right[:num_comparable]
    first = int(differs.argmax())
    return first if differs[first] else num_comparable


def build_prefix_tree(prompts: Sequence[TokenArray]) -> PrefixTree:
    """The compact prefix tree over ``prompts``: int32 arrays ``[num_tokens]``, contiguous, none empty. Not mutated;
    their tokens are copied once while they are sorted."""
    rows = sort_rows(prompts)
    lens = np.fromiter((len(prompts[row]) for row in rows), dtype=np.int64, count=len(rows))
    neighbours = ((prompts[row], prompts[next_row]) for row, next_row in pairwise(rows))
    common_lens = np.fromiter(starmap(common_prefix_len, neighbours), dtype=np.int64)

    is_repeat = (common_lens == lens[:-1]) & (common_lens == lens[1:])
    starts_leaf = np.concatenate([np.ones(min(len(rows), 1), dtype=bool), ~is_repeat])
    row_starts = np.append(np.flatnonzero(starts_leaf), len(rows))
    leaf_lens = lens[starts_leaf]
    # A leaf's last token is never shared.
    leaf_common_lens = np.zeros(len(leaf_lens), dtype=np.int64)
    leaf_common_lens[:-1] = np.minimum(common_lens[~is_repeat], np.minimum(leaf_lens[:-1], leaf_lens[1:]) - 1)
    return PrefixTree(
        rows=np.array(rows, dtype=np.int64),
        row_starts=row_starts,
        leaf_lens=leaf_lens,
        leaf_common_lens=leaf_common_lens,
        **vars(nodes_from_common_lens(leaf_common_lens)),
    )


def sort_rows(prompts: Sequence[TokenArray]) -> list[int]:
    """Rows in byte order of their tokens, which puts a prompt after its own prefixes; stable for identical prompts."""
    keys = [prompt.tobytes() for prompt in prompts]
    return sorted(range(len(prompts)), key=keys.__getitem__)


def nodes_from_common_lens(common_lens: IndexArray) -> TreeNodes:
    """One pass over the leaves, left to right, with the path from the root to the current leaf on a stack.
    `common_lens`, int64 ``[L]``, has the tokens that leaf i shares with leaf i + 1; 0 for the last leaf."""
    depths, parents, leaf_starts, leaf_ends = [0], [-1], [0], [len(common_lens)]
    leaf_nodes: list[int] = []
    path = [0]
    for leaf, common_len in enumerate(common_lens.tolist()):
        leaf_nodes.append(path[-1])
        below = -1
        while depths[path[-1]] > common_len:
            below = path.pop()
            leaf_ends[below] = leaf + 1
        if depths[path[-1]] == common_len:
            continue
        # A new node at common_len: above what was just closed, or else a deeper node that begins with this leaf.
        node = len(depths)
        depths.append(common_len)
        parents.append(path[-1])
        leaf_ends.append(-1)
        if below >= 0:
            parents[below] = node
            leaf_starts.append(leaf_starts[below])
        else:
            leaf_nodes[leaf] = node
            leaf_starts.append(leaf)
        path.append(node)

    # Renumbers the nodes in preorder: by first leaf, the shallower one first.
    order = np.lexsort((depths, leaf_starts))
    new_index = np.empty_like(order)
    new_index[order] = np.arange(len(order))
    node_parents = np.array(parents, dtype=np.int64)[order]
    node_parents[1:] = new_index[node_parents[1:]]
    return TreeNodes(
        leaf_nodes=new_index[np.array(leaf_nodes, dtype=np.int64)],
        node_depths=np.array(depths, dtype=np.int64)[order],
        node_parents=node_parents,
        node_leaf_starts=np.array(leaf_starts, dtype=np.int64)[order],
        node_leaf_ends=np.array(leaf_ends, dtype=np.int64)[order],
    )
