"""Which nodes of a prefix tree become prefixes (BatchLLM section 4.2). A prompt shares at most one.

"exact"
    computes the fewest prompt tokens that any such grouping can. Choose a set of nodes; each leaf uses the deepest
    chosen node above it; minimise the sum of the depths of chosen nodes + the sum of (leaf length - depth of its node).
"paper"
    is Algorithm 1 of BatchLLM, which compares one level of the tree with the next, bottom up.
"none"
    chooses none: only identical prompts are computed once. Encoders need it, in which every token sees the whole text.
"""

from typing import Literal, get_args

import numpy as np

from engine.errors import ConfigError
from engine.planning.choose_by_paper import choose_by_paper
from engine.planning.prefix_tree import IndexArray, PrefixTree

PlanMethod = Literal["exact", "paper", "none"]


def choose_prefixes(tree: PrefixTree, method: PlanMethod) -> IndexArray:
    """The node whose tokens each leaf uses as its prefix, or 0 for none: int64 ``[num_leaves]``.

    Raises:
        ConfigError: the method is unknown.
    """
    if method not in get_args(PlanMethod):
        raise ConfigError(f"method must be one of {', '.join(map(repr, get_args(PlanMethod)))}, got {method!r}")
    if method == "none":
        return np.zeros(tree.num_leaves, dtype=np.int64)
    return _choose_exact(tree) if method == "exact" else choose_by_paper(tree)


def _choose_exact(tree: PrefixTree) -> IndexArray:
    """As `choose_prefixes`, of least total cost.

    Let cost(v, a) be the least cost at and below node v when the nearest chosen node above v has depth a: the depths of
    the chosen nodes, minus for each leaf the depth of the node it uses. A leaf costs -a. Otherwise

        cost(v, a) = min( sum of cost(c, a) over the children c,  depth(v) + sum of cost(c, depth(v)) ).

    The first term never grows with a, the second does not depend on a. So v is chosen exactly when a is below a
    threshold, and a table of cost(v, a) for a = 0 .. depth(parent of v) is all that the parent needs: a few vector
    operations a node, together linear in tokens, since each node has a leaf of its own (the first below its second
    child) that is longer than its table. A chosen node makes the cost smaller, so it has at least two leaves.
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
