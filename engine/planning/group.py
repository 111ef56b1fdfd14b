"""Prefix groups: prompts with a common prefix, as the scheduler takes them (BatchLLM section 4.2)."""

from collections.abc import MutableMapping
from dataclasses import dataclass

import numpy as np

from engine.planning.prefix_tree import TokenArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CommonPrefix:
    """Leading tokens that several groups have in common, counted from the prompt's first one; these groups hold the
    same object. The parent is a shorter common prefix, of more groups; None where there is none."""

    num_tokens: int
    parent: "CommonPrefix | None"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Member:
    """One distinct prompt of a group: computed once, answered for each of its requests.

    Attributes:
        request_indices: positions in the planned input, ascending; several where prompts are identical.
        suffix: int32 ``[num_tokens]``, the tokens after the group's prefix; never empty.
    """

    request_indices: tuple[int, ...]
    suffix: TokenArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixGroup:
    """Distinct prompts with a common prefix. Each member's prompt is prefix + suffix.

    Attributes:
        prefix: int32 ``[num_tokens]``, computed once for all members; empty where a prompt is planned alone.
        members: at least one; at least two where the prefix is not empty and the plan is whole.
        common: the longest part of `leading_tokens` that other groups begin with, too; None where none is known.
    """

    prefix: TokenArray
    members: tuple[Member, ...]
    common: CommonPrefix | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that are computed for the group."""
        return len(self.prefix) + sum(len(member.suffix) for member in self.members)

    @property
    def leading_tokens(self) -> TokenArray:
        """What the group can share with others: its prefix, or a prompt planned alone without its last token."""
        is_alone = len(self.prefix) == 0 and len(self.members) == 1
        return self.members[0].suffix[:-1] if is_alone else self.prefix

    def has_common(self, known: MutableMapping[CommonPrefix, TokenArray]) -> bool:
        """Whether `leading_tokens` begin with `common` and its parents as in the groups before.

        Args:
            known: each common prefix of the groups before, with tokens that begin with it; this group's are added.
        """
        common, tokens = self.common, self.leading_tokens
        end = len(tokens)
        while common is not None:
            if common.num_tokens > end:
                return False
            end = common.num_tokens
            if (other := known.setdefault(common, tokens)) is not tokens:
                return np.array_equal(other[:end], tokens[:end])  # the parents are the other group's, which has them
            common = common.parent
        return True
