"""How many prompt tokens sharing saves (BatchLLM Eq. 2)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.planning.prefix_groups import PrefixGroup
from engine.planning.prefix_tree import build_prefix_tree
from engine.planning.shared_runs import SharedRunForest


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingStats:
    """Prompt tokens of one batch, counted three ways.

    Attributes:
        num_logical_tokens: of all requests, identical ones counted each time.
        num_processed_tokens: that are computed: every prefix, suffix and shared run once.
        num_best_tokens: the fewest that any sharing computes: each beginning once, at every level and to the token,
            and each distinct prompt's last token once.
    """

    num_logical_tokens: int
    num_processed_tokens: int
    num_best_tokens: int

    @property
    def token_saving_ratio(self) -> float:
        """Eq. 2 as a fraction from 0 to 1; 0 where there are no tokens."""
        return self._saved(self.num_processed_tokens)

    @property
    def best_token_saving_ratio(self) -> float:
        """Eq. 2 for the best any sharing could reach, as a fraction from 0 to 1; 0 where there are no tokens."""
        return self._saved(self.num_best_tokens)

    def _saved(self, num_computed_tokens: int) -> float:
        return 1.0 - num_computed_tokens / self.num_logical_tokens if self.num_logical_tokens else 0.0


def measure_sharing(groups: Sequence[PrefixGroup], shared_runs: SharedRunForest | None = None) -> SharingStats:
    """Counts the tokens of a grouping, whoever made it, and of the runs its groups share where they are given.

    The best that any sharing could reach is read off a prefix tree of all prompts (two copies of the tokens).
    """
    num_processed_tokens = sum(group.num_tokens for group in groups)
    if shared_runs is not None:
        num_processed_tokens -= shared_runs.num_saved_tokens
    return SharingStats(
        num_logical_tokens=sum(
            len(member.request_indices) * (len(group.prefix) + len(member.suffix))
            for group in groups
            for member in group.members
        ),
        num_processed_tokens=num_processed_tokens,
        num_best_tokens=build_prefix_tree(
            [np.concatenate([group.prefix, member.suffix]) for group in groups for member in group.members]
        ).num_trie_tokens,
    )
