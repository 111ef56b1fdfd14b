"""The shape of what a batch shares: how deep its prefix tree is, how many prompts share a prefix, how long it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.planning.plan import PrefixGroup
from engine.planning.prefix_tree import PrefixTree


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Of whole numbers; each is one of them. All 0 where there are none."""

    low: int
    median: int
    high: int
    largest: int

    @classmethod
    def of(cls, values: npt.NDArray[np.integer[Any]]) -> "Quantiles":
        """The tenth, fiftieth and ninetieth percentile, and the largest."""
        if len(values) == 0:
            return cls(low=0, median=0, high=0, largest=0)
        low, median, high = np.quantile(values, (0.1, 0.5, 0.9), method="inverted_cdf").tolist()
        return cls(low=low, median=median, high=high, largest=int(values.max()))


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingShape:
    """A batch's prefix tree, and the groups that a plan makes of it.

    Attributes:
        num_tree_nodes: beginnings that at least two different prompts have and then leave, the empty one not counted.
        levels: of the distinct prompts: how many such beginnings lie on the way to each.
        num_groups: of the plan, those of a single prompt included.
        num_sharing_groups: with a prefix, which two or more prompts share.
        share_degree: of these groups: distinct prompts.
        prefix_tokens: of these groups: tokens in the prefix.
    """

    num_tree_nodes: int
    levels: Quantiles
    num_groups: int
    num_sharing_groups: int
    share_degree: Quantiles
    prefix_tokens: Quantiles


def measure_shape(tree: PrefixTree, groups: Sequence[PrefixGroup]) -> SharingShape:
    """Counts both; the groups are a plan of the tree's prompts."""
    node_levels = np.zeros(tree.num_nodes, dtype=np.int64)
    for node, parent in enumerate(tree.node_parents.tolist()):
        if node:
            node_levels[node] = node_levels[parent] + 1
    sharing = [group for group in groups if len(group.prefix)]
    return SharingShape(
        num_tree_nodes=tree.num_nodes - 1,
        levels=Quantiles.of(node_levels[tree.leaf_nodes]),
        num_groups=len(groups),
        num_sharing_groups=len(sharing),
        share_degree=Quantiles.of(np.array([len(group.members) for group in sharing], dtype=np.int64)),
        prefix_tokens=Quantiles.of(np.array([len(group.prefix) for group in sharing], dtype=np.int64)),
    )
