"""Shared runs: full KV blocks that several prefix groups begin with, so that these too are computed and stored once.

A plan has one level of prefixes. Groups whose prefixes begin alike (one instruction above many documents) still repeat
that beginning. A run names its full blocks. The block table of a group can then begin with the blocks of its runs, and
attention still sees one prefix and one suffix per request: a second level at no cost to the kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.errors import ConfigError
from engine.planning.prefix_groups import PrefixGroup
from engine.planning.prefix_tree import IndexArray, TokenArray, build_prefix_tree


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedRun:
    """Prompt tokens ``[start, end)`` of every group that uses the run.

    Attributes:
        index: position among the runs of its forest; parents come before children.
        parent: index of the run that ends where this one starts, or -1 where this one starts at token 0.
        start, end: token positions, multiples of the block size, start < end.
        num_groups: groups that use the run, directly or through a child; at least 2.
        token_ids: int32 ``[end - start]``, a view of the first such group's tokens.
    """

    index: int
    parent: int
    start: int
    end: int
    num_groups: int
    token_ids: TokenArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedRunForest:
    """All runs of a plan, and which group uses which.

    Attributes:
        runs: parents before children.
        group_runs: int64 ``[num_groups]``, each group's deepest run, or -1. The group uses that run and all its
            ancestors, which together cover its tokens ``[0, end of the deepest)``.
    """

    runs: tuple[SharedRun, ...]
    group_runs: IndexArray

    @property
    def num_saved_tokens(self) -> int:
        """Prompt tokens computed less often than without the runs."""
        return sum((run.num_groups - 1) * (run.end - run.start) for run in self.runs)

    def num_covered_tokens(self, group_index: int) -> int:
        """Leading tokens of a group that its runs compute; a multiple of the block size."""
        deepest = int(self.group_runs[group_index])
        return self.runs[deepest].end if deepest >= 0 else 0

    def path(self, group_index: int) -> list[SharedRun]:
        """The runs of a group, from token 0 on; empty where it shares nothing."""
        path = []
        index = int(self.group_runs[group_index])
        while index >= 0:
            path.append(self.runs[index])
            index = self.runs[index].parent
        return path[::-1]


def plan_shared_runs(groups: Sequence[PrefixGroup], block_size: int) -> SharedRunForest:
    """Names the full blocks that two or more groups begin with.

    A group shares its prefix. A prompt planned alone (empty prefix, one member) shares its suffix but for the last
    token, which is always computed: its runs then stand in for a prefix. An empty prefix above several members shares
    nothing. A run may cover a group's whole prefix, but never the last token of a prompt.

    Args:
        groups: all that are served together; any plan, either method.
        block_size: tokens in a KV block.

    Raises:
        ConfigError: block_size is below 1.
    """
    if block_size < 1:
        raise ConfigError(f"block_size must be at least 1, got {block_size}")
    shareable = [_shareable_tokens(group) for group in groups]
    # The tree keeps every sequence's last token to itself, and equal sequences as one leaf. A group's own end mark
    # behind its tokens makes both right here: all tokens are shareable, each group is a leaf.
    tree = build_prefix_tree([np.append(tokens, np.int32(-1 - i)) for i, tokens in enumerate(shareable)])

    block_ends = tree.node_depths // block_size * block_size
    runs: list[SharedRun] = []
    node_runs = [-1] * tree.num_nodes
    for node in range(1, tree.num_nodes):
        parent_node = int(tree.node_parents[node])
        node_runs[node] = node_runs[parent_node]
        start, end = int(block_ends[parent_node]), int(block_ends[node])
        if start == end:
            continue
        leaf_start, leaf_end = int(tree.node_leaf_starts[node]), int(tree.node_leaf_ends[node])
        node_runs[node] = len(runs)
        runs.append(
            SharedRun(
                index=len(runs),
                parent=node_runs[parent_node],
                start=start,
                end=end,
                num_groups=leaf_end - leaf_start,
                token_ids=shareable[tree.rows[leaf_start]][start:end],
            )
        )
    group_runs = np.full(len(groups), -1, dtype=np.int64)
    group_runs[tree.rows] = np.array(node_runs, dtype=np.int64)[tree.leaf_nodes]
    return SharedRunForest(runs=tuple(runs), group_runs=group_runs)


def _shareable_tokens(group: PrefixGroup) -> TokenArray:
    if len(group.prefix) == 0 and len(group.members) == 1:
        return group.members[0].suffix[:-1]
    return group.prefix
