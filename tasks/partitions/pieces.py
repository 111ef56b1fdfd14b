"""Pieces of a partition: ranges of its distinct prompts, which are tried separately after a failure."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.planning.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A range of a partition's distinct prompts, numbered group by group; both ends are included."""

    first: int
    last: int


class Pieces:
    """The rows of a partition by the numbers of their distinct prompts. Rows with the same prompt stay together.

    Attributes:
        group_of_prompt: int64, the prefix group of each distinct prompt.
    """

    def __init__(self, rows: Plan) -> None:
        self._rows = rows
        self._prompt_of_row = np.cumsum(rows.is_member_start) - 1
        self.group_of_prompt = rows.group_id[rows.is_member_start]

    @property
    def whole(self) -> Piece:
        return Piece(first=0, last=len(self.group_of_prompt) - 1)

    def find_prompts(self, piece: Piece, answered: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Numbers, ascending, of the piece's prompts of which a row is not among the `answered` row ids."""
        return np.unique(self._prompt_of_row[self._is_open(piece, answered)])

    def select(self, piece: Piece, answered: npt.NDArray[np.int64]) -> Plan:
        """The piece's rows that are not among the `answered` row ids."""
        return self._rows.select(self._is_open(piece, answered))

    def _is_open(self, piece: Piece, answered: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        is_inside = (self._prompt_of_row >= piece.first) & (self._prompt_of_row <= piece.last)
        return np.asarray(is_inside & ~np.isin(self._rows.row_id, answered))


def split(prompts: npt.NDArray[np.int64], group_of_prompt: npt.NDArray[np.int64]) -> tuple[Piece, Piece]:
    """Split a range of at least two prompts, as near to the middle as possible: between prefix groups if there are
    several, else within the group."""
    cuts = np.flatnonzero(np.diff(group_of_prompt[prompts])) + 1
    middle = len(prompts) // 2
    cut = int(cuts[np.argmin(np.abs(cuts - middle))]) if len(cuts) else middle
    left, right = prompts[:cut].tolist(), prompts[cut:].tolist()
    return Piece(first=left[0], last=left[-1]), Piece(first=right[0], last=right[-1])
