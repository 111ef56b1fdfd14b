"""Pieces of a partition: ranges of its distinct prompts, which are tried separately after a failure."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A range of a partition's distinct prompts, numbered group by group; both ends are included."""

    first: int
    last: int


def split(prompts: npt.NDArray[np.int64], group_of_prompt: npt.NDArray[np.int64]) -> tuple[Piece, Piece]:
    """Split a range of at least two prompts, as near to the middle as possible: between prefix groups if there are
    several, else within the group."""
    cuts = np.flatnonzero(np.diff(group_of_prompt[prompts])) + 1
    middle = len(prompts) // 2
    cut = int(cuts[np.argmin(np.abs(cuts - middle))]) if len(cuts) else middle
    left, right = prompts[:cut].tolist(), prompts[cut:].tolist()
    return Piece(first=left[0], last=left[-1]), Piece(first=right[0], last=right[-1])
