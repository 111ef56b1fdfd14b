"""A partition cut into pieces: what is tried as one, and where it is split in two when it fails."""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks.partitions.partition import Partition


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Neighbouring distinct prompts of a partition, numbered group by group: the first and the last."""

    first: int
    last: int


class Pieces:
    """The rows of a partition as a line of distinct prompts. Rows that have the same prompt stay together."""

    __slots__ = ("_group_of_prompt", "_prompt_of_row", "_rows")

    def __init__(self, rows: Partition) -> None:
        order = np.lexsort((rows.member_id, rows.group_id))
        groups, members = rows.group_id[order], rows.member_id[order]
        begins_prompt = (np.diff(groups, prepend=-1) != 0) | (np.diff(members, prepend=-1) != 0)
        self._rows = rows
        self._group_of_prompt = groups[begins_prompt]
        self._prompt_of_row = np.empty(len(order), dtype=np.int64)
        self._prompt_of_row[order] = np.cumsum(begins_prompt) - 1

    @property
    def whole(self) -> Piece:
        return Piece(first=0, last=len(self._group_of_prompt) - 1)

    def find_prompts(self, piece: Piece, answered: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Ascending numbers of the piece's prompts with a row that is not among the `answered` row ids."""
        return np.unique(self._prompt_of_row[self._is_open(piece, answered)])

    def select(self, piece: Piece, answered: npt.NDArray[np.int64]) -> Partition:
        """The piece's rows that are not among the `answered` row ids."""
        return select_rows(self._rows, np.flatnonzero(self._is_open(piece, answered)))

    def split(self, prompts: npt.NDArray[np.int64]) -> tuple[Piece, Piece]:
        """Two pieces that hold these prompts, at least two in ascending order: cut between prefix groups where there
        are several, else within the group, as near to the middle as can be."""
        groups = self._group_of_prompt[prompts]
        cuts = np.flatnonzero(np.diff(groups)) + 1
        middle = len(prompts) // 2
        cut = int(cuts[np.argmin(np.abs(cuts - middle))]) if len(cuts) else middle
        ends = [(prompts[0], prompts[cut - 1]), (prompts[cut], prompts[-1])]
        left, right = (Piece(first=int(first), last=int(last)) for first, last in ends)
        return left, right

    def _is_open(self, piece: Piece, answered: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        is_inside = (self._prompt_of_row >= piece.first) & (self._prompt_of_row <= piece.last)
        is_open: npt.NDArray[np.bool_] = is_inside & ~np.isin(self._rows.row_ids, answered)
        return is_open


def select_rows(rows: Partition, positions: npt.NDArray[np.int64]) -> Partition:
    """The rows at these positions, with all their columns."""
    chosen: dict[str, Any] = {}
    for field in fields(rows):
        column = getattr(rows, field.name)
        is_list = isinstance(column, list)
        chosen[field.name] = [column[at] for at in positions.tolist()] if is_list else column[positions]
    return replace(rows, **chosen)
