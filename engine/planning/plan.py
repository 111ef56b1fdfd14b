"""A plan: which rows share which prefix, as columns; `Plan.groups` gives them as prefix groups.

A prompt has at most one prefix, that of its group (BatchLLM section 4.3.1). Groups come in prefix tree order, so two
groups have in common the least of the common lengths of the neighbours between them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.planning.group import CommonPrefix, Member, PrefixGroup
from engine.planning.prefix_tree import IndexArray, TokenArray, nodes_from_common_lens

COLUMNS = ("row_id", "group_id", "member_id", "num_prefix_tokens", "num_common_tokens", "partition", "priority")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingStats:
    """Prompt tokens of one batch, counted three ways.

    Attributes:
        num_logical_tokens: of all requests, identical ones counted each time.
        num_processed_tokens: those computed: every prefix, every suffix, and every full block of several groups once.
        num_best_tokens: the fewest that any sharing computes: every node of the prefix tree once.
    """

    num_logical_tokens: int = 0
    num_processed_tokens: int = 0
    num_best_tokens: int = 0

    @property
    def token_saving_ratio(self) -> float:
        """BatchLLM Eq. 2 as a fraction from 0 to 1; 0 where there are no tokens."""
        return self._saved(self.num_processed_tokens)

    @property
    def best_token_saving_ratio(self) -> float:
        """Eq. 2 for the best possible sharing, as a fraction from 0 to 1; 0 where there are no tokens."""
        return self._saved(self.num_best_tokens)

    def _saved(self, num_computed_tokens: int) -> float:
        return 1.0 - num_computed_tokens / self.num_logical_tokens if self.num_logical_tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """All or some rows of a plan, sorted by group, member and row id. Columns are ``[num_rows]``.

    Attributes:
        prompts: int32 arrays ``[num_tokens]``, one for each row.
        row_id: int64, of the table's row, or the position in the planned input; ascending within a member.
        group_id: int64, in prefix tree order: groups whose prefixes begin with the same tokens are neighbours. A prompt
            planned alone is a group of its own, because groups are the unit of scheduling.
        member_id: int64, ascending within a group; equal where prompts are identical.
        num_prefix_tokens: int32, leading tokens that are the group's prefix; 0 where a prompt is planned alone.
        num_common_tokens: int32, a lower bound on the leading tokens that the row's group shares with the group before.
        partition: int32, the unit of work of the row.
        priority: int64, of the row.
    """

    prompts: Sequence[TokenArray]
    row_id: IndexArray
    group_id: IndexArray
    member_id: IndexArray
    num_prefix_tokens: npt.NDArray[np.int32]
    num_common_tokens: npt.NDArray[np.int32]
    partition: npt.NDArray[np.int32]
    priority: IndexArray

    @property
    def num_rows(self) -> int:
        return len(self.row_id)

    @property
    def is_group_start(self) -> npt.NDArray[np.bool_]:
        return np.asarray(np.diff(self.group_id, prepend=-1) != 0)

    @property
    def is_member_start(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.is_group_start | (np.diff(self.member_id, prepend=-1) != 0))

    @property
    def group_starts(self) -> IndexArray:
        """Position of each group's first row."""
        return np.flatnonzero(self.is_group_start)

    @property
    def num_prompt_tokens(self) -> IndexArray:
        """Of each row."""
        return np.fromiter(map(len, self.prompts), dtype=np.int64, count=len(self.prompts))

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens that the groups compute: every prefix and suffix once."""
        suffixes = (self.num_prompt_tokens - self.num_prefix_tokens)[self.is_member_start]
        return int(suffixes.sum() + self.num_prefix_tokens[self.group_starts].sum(dtype=np.int64))

    def num_common_block_tokens(self, block_size: int | None) -> int:
        """Of `num_computed_tokens`, those in full blocks that an earlier group computes, too."""
        return int(whole_blocks(self.num_common_tokens[self.group_starts], block_size).sum())

    def take(self, positions: IndexArray) -> "Plan":
        """The rows at these positions, all columns unchanged."""
        columns: dict[str, Any] = {name: getattr(self, name)[positions] for name in COLUMNS}
        return Plan(prompts=[self.prompts[position] for position in positions.tolist()], **columns)

    def select(self, is_chosen: npt.NDArray[np.bool_]) -> "Plan":
        """The rows where `is_chosen`, bool ``[num_rows]``; num_common_tokens then refers to these rows' groups."""
        group_of_row = np.cumsum(self.is_group_start) - 1
        chosen = self.take(np.flatnonzero(is_chosen))
        left, group_of_chosen = np.unique(group_of_row[is_chosen], return_inverse=True)
        common = common_lens_of(self.num_common_tokens[self.group_starts], left)
        return replace(chosen, num_common_tokens=common[group_of_chosen].astype(np.int32))

    def groups(self) -> list[PrefixGroup]:
        """The rows as groups; prefixes and suffixes are views of the prompts, request_indices rank rows by row id."""
        request_indices = np.argsort(np.argsort(self.row_id)).tolist()
        prefix_lens, is_group_start = self.num_prefix_tokens.tolist(), [*self.is_group_start.tolist(), True]
        commons = iter(_common_prefixes(self.num_common_tokens[self.group_starts]))
        groups: list[PrefixGroup] = []
        members: list[Member] = []
        for row, next_row in pairwise([*np.flatnonzero(self.is_member_start).tolist(), self.num_rows]):
            prompt, prefix_len = self.prompts[row], prefix_lens[row]
            members.append(Member(request_indices=tuple(request_indices[row:next_row]), suffix=prompt[prefix_len:]))
            if is_group_start[next_row]:
                groups.append(PrefixGroup(prefix=prompt[:prefix_len], members=tuple(members), common=next(commons)))
                members = []
        return groups


def whole_blocks(lens: npt.NDArray[np.integer[Any]], block_size: int | None) -> IndexArray:
    """`lens` rounded down to full blocks, int64; 0 where no blocks are shared: block_size is None."""
    return lens.astype(np.int64) // block_size * block_size if block_size else np.zeros(len(lens), np.int64)


def common_lens_of(common_lens: npt.NDArray[np.integer[Any]], groups: IndexArray) -> IndexArray:
    """Leading tokens that each of `groups`, int64 indices, has in common with the one before: the least of the lengths
    between; int64. The first gets 0, and so does one whose index is below the one before. `common_lens`,
    ``[num_groups]``, has the tokens that each group of a plan has in common with the group before."""
    before, after = groups[:-1], groups[1:]
    bounds = np.stack([before + 1, after + 1], axis=1).ravel()
    least = np.minimum.reduceat(np.append(common_lens, 0), bounds)[::2] if len(bounds) else bounds
    return np.concatenate([np.zeros(min(len(groups), 1)), np.where(before < after, least, 0)]).astype(np.int64)


def _common_prefixes(common_lens: npt.NDArray[np.integer[Any]]) -> list[CommonPrefix | None]:
    """The longest prefix that each group has in common with others."""
    nodes = nodes_from_common_lens(np.append(common_lens[1:], 0)[: len(common_lens)])
    found: list[CommonPrefix | None] = [None]
    for depth, parent in zip(nodes.node_depths[1:].tolist(), nodes.node_parents[1:].tolist(), strict=True):
        found.append(CommonPrefix(num_tokens=depth, parent=found[parent]))
    return [found[node] for node in nodes.leaf_nodes.tolist()]
