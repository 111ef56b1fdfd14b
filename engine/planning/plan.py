"""The global plan of a batch: which prompts share which prefix (BatchLLM section 4.2).

A prompt shares at most one prefix. Two methods choose the prefixes among the nodes of the prefix tree:

"exact"
    computes the fewest prompt tokens that any such grouping can. Choose a set of nodes; each leaf uses the deepest
    chosen node above it; minimise the sum of the depths of chosen nodes + the sum of (leaf length - depth of its node).
"paper"
    is Algorithm 1 of BatchLLM, which compares one level of the tree with the next, bottom up.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from engine.errors import ConfigError, RequestError
from engine.planning.prefix_groups import Member, PrefixGroup, assemble_groups
from engine.planning.prefix_tree import IndexArray, PrefixTree, TokenArray, build_prefix_tree
from engine.planning.sharing_stats import SharingStats

__all__ = [
    "Member",
    "PlanMethod",
    "PlanTable",
    "PrefixGroup",
    "Prompt",
    "SharingStats",
    "plan_prefix_groups",
    "plan_prompts",
    "plan_token_table",
]

PlanMethod = Literal["exact", "paper"]
Prompt = Sequence[int] | npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanTable:
    """A plan as columns, one row per prompt, in input order.

    Attributes:
        group_id: int64 ``[num_rows]``, 0 .. num_groups - 1, in prefix tree order: groups whose prefixes begin alike are
            next to each other. A prompt planned alone has a group of its own, because the group is what is scheduled.
        member_id: int64 ``[num_rows]``, 0 .. members of the group - 1; equal where prompts are identical.
        num_prefix_tokens: int32 ``[num_rows]``, leading tokens that are the group's prefix; 0 where planned alone.
        sharing: tokens counted without and with the plan.
    """

    group_id: IndexArray
    member_id: IndexArray
    num_prefix_tokens: npt.NDArray[np.int32]
    sharing: SharingStats

    @property
    def num_groups(self) -> int:
        return int(self.group_id.max()) + 1 if len(self.group_id) else 0


def plan_prefix_groups(sequences: Sequence[Prompt], *, method: PlanMethod = "exact") -> list[PrefixGroup]:
    """Groups prompts by the prefix they share, so that each prefix and each identical prompt is computed once.

    Args:
        sequences: token ids, each a list, tuple, array or any other sequence of integers that fit int32. An int32
            array is used where it lies: prefixes and suffixes are views of it.
        method: "exact" or "paper"; the module says what they mean.

    Returns:
        groups in prefix tree order, the same for any order of ``sequences`` up to request_indices. Every request is in
        exactly one group; prefix + suffix is its prompt; a suffix is never empty. Prompts that share nothing worth a
        prefix come as groups of one with an empty prefix, one group for each distinct prompt.

    Raises:
        RequestError: a sequence is empty or holds something else than int32 integers; the message names its index.
        ConfigError: the method is unknown.
    """
    prompts = [_token_array(sequence, index) for index, sequence in enumerate(sequences)]
    table = plan_prompts(prompts, method=method)
    order = np.lexsort((table.member_id, table.group_id)).tolist()
    return assemble_groups(prompts, order, table.group_id, table.member_id, table.num_prefix_tokens)


def plan_token_table(values: TokenArray, offsets: IndexArray, *, method: PlanMethod = "exact") -> PlanTable:
    """As `plan_prefix_groups`, on flat columns: prompt i is ``values[offsets[i] : offsets[i + 1]]``.

    Args:
        values: int32 ``[num_tokens]``, contiguous; not copied as a whole, but once while prompts are sorted.
        offsets: int64 ``[num_rows + 1]``, ascending, within ``values``; need not begin at 0.
        method: "exact" or "paper".

    Raises:
        RequestError: a prompt is empty (the message names its row), or the columns are not as described.
        ConfigError: the method is unknown.
    """
    values, offsets = np.asarray(values), np.asarray(offsets)
    if values.dtype != np.int32 or values.ndim != 1 or not values.flags.c_contiguous:
        raise RequestError(f"values must be contiguous int32 [num_tokens], got {values.dtype} of shape {values.shape}")
    if offsets.dtype.kind != "i" or offsets.ndim != 1 or len(offsets) == 0:
        raise RequestError(f"offsets must be num_rows + 1 integers, got {offsets.dtype} of shape {offsets.shape}")
    if offsets[0] < 0 or offsets[-1] > len(values):
        raise RequestError(f"offsets go from {offsets[0]} to {offsets[-1]}, expected within 0 to {len(values)}")
    bounds = offsets.tolist()
    prompts = []
    for row, (start, end) in enumerate(pairwise(bounds)):
        if end <= start:
            raise RequestError(f"row {row}: the prompt must hold at least one token, got offsets {start} to {end}")
        prompts.append(values[start:end])
    return plan_prompts(prompts, method=method)


def _token_array(sequence: Prompt, index: int) -> TokenArray:
    """One prompt as contiguous int32; a view where it is that already."""
    try:
        if isinstance(sequence, np.ndarray):
            if sequence.ndim != 1 or sequence.dtype.kind not in "iu":
                raise TypeError(f"got an array of {sequence.dtype} with shape {sequence.shape}")
            tokens = np.ascontiguousarray(sequence, dtype=np.int32)
            if sequence.dtype != np.int32 and not np.array_equal(tokens, sequence):
                raise OverflowError(f"got values from {sequence.min()} to {sequence.max()}")
        else:
            # struct refuses what is not an integer or does not fit, at half the cost of numpy's conversion.
            tokens = np.frombuffer(struct.pack(f"{len(sequence)}i", *sequence), dtype=np.int32)
    except (TypeError, ValueError, OverflowError, struct.error) as error:
        raise RequestError(f"sequence {index}: token ids must be integers that fit int32: {error}") from error
    if len(tokens) == 0:
        raise RequestError(f"sequence {index}: the prompt must hold at least one token, got none")
    return tokens


def plan_prompts(prompts: Sequence[TokenArray], *, method: PlanMethod = "exact") -> PlanTable:
    """As `plan_token_table`, on contiguous int32 arrays, none of them empty; this is not checked.

    Raises:
        ConfigError: the method is unknown.
    """
    if method not in get_args(PlanMethod):
        raise ConfigError(f"method must be one of {', '.join(map(repr, get_args(PlanMethod)))}, got {method!r}")
    tree = build_prefix_tree(prompts)
    prefix_nodes = _choose_exact(tree) if method == "exact" else _choose_paper(tree)

    # Group order: by first leaf below the group's node, an ancestor before its descendants; a leaf alone where it is.
    leaves = np.arange(tree.num_leaves)
    is_alone = prefix_nodes == 0
    group_keys = np.where(is_alone, tree.num_nodes + leaves, prefix_nodes)
    group_leaf_starts = np.where(is_alone, leaves, tree.node_leaf_starts[prefix_nodes])
    order = np.lexsort((group_keys, group_leaf_starts))
    starts_group = np.ones(tree.num_leaves, dtype=bool)
    starts_group[1:] = np.diff(group_keys[order]) != 0
    leaf_group_ids = np.empty(tree.num_leaves, dtype=np.int64)
    leaf_group_ids[order] = np.cumsum(starts_group) - 1
    leaf_member_ids = np.empty(tree.num_leaves, dtype=np.int64)
    leaf_member_ids[order] = leaves - np.flatnonzero(starts_group)[leaf_group_ids[order]]

    prefix_lens = tree.node_depths[prefix_nodes]
    first_lens = prefix_lens[order][starts_group]
    return PlanTable(
        group_id=_by_row(tree, leaf_group_ids),
        member_id=_by_row(tree, leaf_member_ids),
        num_prefix_tokens=_by_row(tree, prefix_lens).astype(np.int32),
        sharing=SharingStats(
            num_logical_tokens=tree.num_logical_tokens,
            num_processed_tokens=int(first_lens.sum() + (tree.leaf_lens - prefix_lens).sum()),
            num_best_tokens=tree.num_trie_tokens,
        ),
    )


def _by_row(tree: PrefixTree, leaf_values: IndexArray) -> IndexArray:
    row_values = np.empty(len(tree.rows), dtype=np.int64)
    row_values[tree.rows] = np.repeat(leaf_values, np.diff(tree.row_starts))
    return row_values


def _choose_exact(tree: PrefixTree) -> IndexArray:
    """The node whose tokens each leaf uses as its prefix, or 0 for none: int64 ``[num_leaves]``, of least total cost.

    Let cost(v, a) be the least cost at and below node v when the nearest chosen node above v has depth a: the depths of
    the chosen nodes, minus for each leaf the depth of the node it uses. A leaf costs -a. Otherwise

        cost(v, a) = min( sum of cost(c, a) over the children c,  depth(v) + sum of cost(c, depth(v)) ).

    The first term never grows with a, the second does not depend on a. So v is chosen exactly when a is below a
    threshold, and a table of cost(v, a) for a = 0 .. depth(parent of v) is all that the parent needs: a few vector
    operations a node, together linear in tokens, since each node can be charged to a leaf of its own (the first below
    its second child) that is longer than its table. A node is chosen only where that makes the cost smaller, so it has
    at least two leaves of its own.
    """
    num_nodes = tree.num_nodes
    depths, parents = tree.node_depths.tolist(), tree.node_parents.tolist()
    num_own_leaves = np.bincount(tree.leaf_nodes, minlength=num_nodes).tolist()
    ramp = np.arange(max(depths) + 1)
    child_costs: list[IndexArray | None] = [None] * num_nodes  # summed over the children that are nodes, by a
    thresholds = [0] * num_nodes
    for node in range(num_nodes - 1, 0, -1):
        depth, parent = depths[node], parents[node]
        num_states = depths[parent] + 1
        kept, child_costs[node] = child_costs[node], None
        if_chosen = depth - num_own_leaves[node] * depth
        costs = -num_own_leaves[node] * ramp[:num_states]
        if kept is not None:
            if_chosen += int(kept[depth])
            costs += kept[:num_states]
        thresholds[node] = int(np.count_nonzero(costs > if_chosen))
        np.minimum(costs, if_chosen, out=costs)
        siblings = child_costs[parent]
        if siblings is None:
            child_costs[parent] = costs
        else:
            siblings += costs

    nearest_chosen = [0] * num_nodes
    for node in range(1, num_nodes):
        above = nearest_chosen[parents[node]]
        nearest_chosen[node] = node if depths[above] < thresholds[node] else above
    return np.array(nearest_chosen, dtype=np.int64)[tree.leaf_nodes]


def _choose_paper(tree: PrefixTree) -> IndexArray:
    """As `_choose_exact`, by BatchLLM's Algorithm 1, which maximises the first level of the tree from the bottom up.

    Once the subtree of a node's child is done, each grandchild is compared with the child: forked off and merged with a
    copy of the child (so that it becomes a child of the node, with the tokens of both) if

        gain = (leaves(grandchild) - 1) * tokens(grandchild)  >  penalty = tokens(child),

    where leaves counts those not forked off before. A grandchild that stays is part of the child from then on: its
    leaves share the child's tokens and nothing deeper. In the end the children of the root are the prefixes.
    """
    num_nodes = tree.num_nodes
    depths, parents = tree.node_depths.tolist(), tree.node_parents.tolist()
    num_leaves = np.bincount(tree.leaf_nodes, minlength=num_nodes).tolist()
    merged_children: list[list[int]] = [[] for _ in range(num_nodes)]  # as they are after the forks so far
    owners = list(range(num_nodes))
    for child in range(num_nodes - 1, 0, -1):
        node = parents[child]
        penalty = depths[child] - depths[node]
        for grandchild in merged_children[child]:
            if (num_leaves[grandchild] - 1) * (depths[grandchild] - depths[child]) > penalty:
                merged_children[node].append(grandchild)
            else:
                owners[grandchild] = child
                num_leaves[child] += num_leaves[grandchild]
        merged_children[child] = []
        merged_children[node].append(child)
    for node in range(1, num_nodes):
        owners[node] = owners[owners[node]]
    used = np.array(owners, dtype=np.int64)[tree.leaf_nodes]
    return np.where(np.bincount(used, minlength=num_nodes)[used] > 1, used, 0)
