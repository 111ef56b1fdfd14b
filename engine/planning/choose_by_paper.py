"""BatchLLM's choice of prefixes (section 4.2, Algorithm 1), level by level of the tree from the bottom up."""

import numpy as np

from engine.planning.prefix_tree import IndexArray, PrefixTree


def choose_by_paper(tree: PrefixTree, block_size: int | None) -> IndexArray:
    """The node whose tokens each leaf uses as its prefix, or 0 for none: int64 ``[num_leaves]``.

    The algorithm maximises the first level of the tree from the bottom up. Once the subtree of a node's child is done,
    each grandchild is compared with the child: forked off and merged with a copy of the child (so that it becomes a
    child of the node, with the tokens of both) if

        gain = (leaves(grandchild) - 1) * tokens(grandchild)  >  penalty = tokens(child),

    where leaves counts those not forked off before. A grandchild that is not forked off becomes part of the child: its
    leaves share the child's tokens and nothing deeper. In the end the children of the root are the prefixes, but for
    those shorter than a block of `block_size` tokens, which are computed with each suffix.
    """
    num_nodes = tree.num_nodes
    depths, parents = tree.node_depths.tolist(), tree.node_parents.tolist()
    num_leaves = np.bincount(tree.leaf_nodes, minlength=num_nodes).tolist()
    merged_children: list[list[int]] = [[] for _ in range(num_nodes)]  # after the forks so far
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
    is_prefix = (np.bincount(used, minlength=num_nodes)[used] > 1) & (tree.node_depths[used] >= (block_size or 1))
    return np.where(is_prefix, used, 0)
