"""Which nodes of a prefix tree become prefixes, so that the fewest prompt tokens are computed."""

import numpy as np

from engine.planning.plan import whole_blocks
from engine.planning.prefix_tree import IndexArray, PrefixTree


def choose_exactly(tree: PrefixTree, block_size: int | None) -> IndexArray:
    """An exact dynamic programme; returns int64 ``[num_leaves]``, see `choose_prefixes`.

    whole(v) is the part of a node's tokens that fills blocks. A node v is open where a prefix at or below it, or a
    prompt planned alone, keeps these blocks: they are computed once. Let cost(v, a) be the tokens computed at and below
    v, less those of its prompts, when its parent is open and the nearest chosen node above has depth a. It is the least
    of

        shut    -a for each leaf below v,
        kept    whole(v) - whole(parent) + sum of cost(c, a) over the children c - max(a, whole(v)) for each own leaf,
        chosen  depth(v) - whole(parent) + sum of cost(c, depth(v)) - depth(v) for each own leaf.

    The cost of chosen does not depend on a, that of kept never grows with a, and none falls faster than that of shut.
    So v is chosen for a below one threshold, open below another, and its parent needs only a table of cost(v, a) for
    a = 0 .. depth(parent). That is a few vector operations per node, and linear in tokens: each node has a leaf (the
    first below its second child) that is longer than its table. Of equal costs the fewest groups win (`unit`), so a
    prefix has at least two leaves.
    """
    num_nodes, unit = tree.num_nodes, tree.num_leaves + 1
    depths, parents = tree.node_depths.tolist(), tree.node_parents.tolist()
    wholes = whole_blocks(tree.node_depths, block_size).tolist()
    num_leaves = (tree.node_leaf_ends - tree.node_leaf_starts).tolist()
    num_own_leaves = np.bincount(tree.leaf_nodes, minlength=num_nodes).tolist()
    savings = unit * np.arange(max(depths) + 1)  # of a leaf, by a
    savings[0] = -1
    child_costs: list[IndexArray | None] = [None] * num_nodes  # summed over the children that are nodes, by a
    chosen_below, open_below = [0] * num_nodes, [0] * num_nodes
    for node in range(num_nodes - 1, 0, -1):
        depth, parent, num_own = depths[node], parents[node], num_own_leaves[node]
        saved = savings[: depths[parent] + 1]
        if_shut = -num_leaves[node] * saved
        costs = unit * (wholes[node] - wholes[parent]) - num_own * np.maximum(saved, unit * wholes[node] - 1)
        if_chosen = unit * (depth - wholes[parent] - num_own * depth) + 1
        below, child_costs[node] = child_costs[node], None
        if below is not None:
            costs += below[: len(saved)]
            if_chosen += int(below[depth])
        np.minimum(costs, if_shut, out=costs)
        if depth >= (block_size or 1):  # a shorter prefix is computed with each suffix
            chosen_below[node] = int(np.count_nonzero(costs > if_chosen))
            np.minimum(costs, if_chosen, out=costs)
        open_below[node] = int(np.count_nonzero(costs < if_shut))
        siblings = child_costs[parent]
        child_costs[parent] = costs if siblings is None else siblings + costs

    prefixes, is_open = [0] * num_nodes, [True] * num_nodes
    for node in range(1, num_nodes):
        above = prefixes[parents[node]]
        is_open[node] = is_open[parents[node]] and depths[above] < open_below[node]
        prefixes[node] = node if is_open[node] and depths[above] < chosen_below[node] else above
    is_alone = np.array(is_open) & (wholes > tree.node_depths[prefixes])
    return np.where(is_alone, 0, prefixes)[tree.leaf_nodes]
