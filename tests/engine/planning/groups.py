"""What tests say of prefix groups, counted from the groups alone."""

from collections.abc import Sequence

import numpy as np

from engine.planning.group import PrefixGroup
from engine.planning.plan import SharingStats
from engine.planning.prefix_tree import build_prefix_tree


def measure_sharing(groups: Sequence[PrefixGroup]) -> SharingStats:
    """Counts the tokens of a grouping, whoever made it; the best that any sharing could reach from a tree of all
    prompts."""
    return SharingStats(
        num_logical_tokens=sum(
            len(member.request_indices) * (len(group.prefix) + len(member.suffix))
            for group in groups
            for member in group.members
        ),
        num_processed_tokens=sum(group.num_tokens for group in groups),
        num_best_tokens=build_prefix_tree(
            [np.concatenate([group.prefix, member.suffix]) for group in groups for member in group.members]
        ).num_trie_tokens,
    )
