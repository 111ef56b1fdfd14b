"""The time of tiles under several launches at once, and the best number of splits of their KV ranges."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from engine.kernels.triton.tuned import Launch

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

Number = TypeVar("Number", bound=np.number)

MOST_ROUNDS = 4
"""Ranges are split into at most as many tiles as the program slots compute in so many rounds."""

_SPLITS = np.array([1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32])[:, None]
"""Candidates for the number of parts of the longest range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The times of the two tile shapes of L launches, float64 ``[L, 2, 1]``, see `TileShape`; `tokens`, int64, are rows
    of the batch per tile. A launch without a wide shape has its narrow one twice."""

    tile_us: Floats
    token_us: Floats
    partial_us: Floats
    tokens: Ints

    @classmethod
    def of(cls, launches: Sequence[Launch], group_size: int) -> "Rates":
        shapes = [(launch.narrow, launch.wide or launch.narrow) for launch in launches]
        rates = [[(each.tile_us, each.kilotoken_us, each.partial_us, each.rows) for each in pair] for pair in shapes]
        tile_us, kilotoken_us, partial_us, rows = np.array(rates).transpose(2, 0, 1)[..., None]
        tokens = rows.astype(np.int64) // group_size
        return cls(tile_us=tile_us, token_us=kilotoken_us / 1000, partial_us=partial_us, tokens=tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """The tiles of each sequence or group, before KV ranges are split, under L launches: ``[L, n]``.

    Attributes:
        shape: index into the launch's shapes.
        num_read: KV tokens that all of them read.
        longest: KV tokens that the longest of them reads.
        is_partial: whether their results are partial even if they are not split.
        total_us: slot time of all of them.
    """

    shape: Ints
    num_tiles: Ints
    num_read: Ints
    longest: Ints
    is_partial: npt.NDArray[np.bool_]
    total_us: Floats

    def where(self, is_kept: npt.NDArray[np.bool_]) -> "Ranges":
        """The same with no tiles where is_kept ``[L, n]`` is false."""
        return Ranges(
            shape=self.shape, num_tiles=self.num_tiles * is_kept, num_read=self.num_read * is_kept,
            longest=self.longest * is_kept, is_partial=self.is_partial & is_kept, total_us=self.total_us * is_kept,
        )  # fmt: skip

    def followed_by(self, others: "Ranges") -> "Ranges":
        """Concatenates two sets of ranges."""
        return Ranges(
            **{name: np.concatenate([getattr(self, name), getattr(others, name)], axis=1) for name in Ranges.__slots__}
        )

    def totals(self) -> tuple[list[int], list[int], list[float]]:
        """Per launch: number of tiles, KV tokens that they read, slot time."""
        return self.num_tiles.sum(1).tolist(), self.num_read.sum(1).tolist(), self.total_us.sum(1).tolist()

    def split(self, number: int, launch: Launch, slots_a_head: float, min_split_tokens: int) -> tuple[float, float]:
        """Finds the best limit for the time of a tile, above which its range is split. Returns the time of all program
        slots, and the limit, in microseconds.

        Args:
            number, launch: the launch, and its index.
            slots_a_head: its program slots per KV head.
            min_split_tokens: fewest KV tokens of a part.
        """
        num_tiles, total_us = self.num_tiles[number], self.total_us[number].sum()
        longest, is_partial = self.longest[number], self.is_partial[number]
        tile_us, token_us, partial_us = slot_costs(launch, self.shape[number])
        range_us = tile_us + token_us * longest
        most = np.maximum(longest // min_split_tokens, 1)
        splits = _SPLITS[: _SPLITS[:, 0].searchsorted(most.max()) + 1]  # with more, no range has more parts
        longest_us = range_us.max() / splits * (1 + 1e-9)
        parts = np.minimum(np.ceil(range_us / longest_us), most)
        becomes_partial = is_partial | (parts > 1)
        added_us = tile_us * (parts - 1) + partial_us * (becomes_partial * parts - is_partial)
        numbers = (num_tiles * parts).sum(1)
        rounds = np.ceil(numbers / slots_a_head)
        longest_tile_us = (tile_us + token_us * longest / parts + partial_us * becomes_partial).max(1)
        slots_us = np.maximum(rounds / numbers * (total_us + (num_tiles * added_us).sum(1)), longest_tile_us)
        slots_us[1:][rounds[1:] > MOST_ROUNDS] = np.inf
        best = int(slots_us.argmin())
        return float(slots_us[best]), float(longest_us[best, 0])


def slot_costs(launch: Launch, shape: Ints) -> Floats:
    """Slot times in microseconds of a tile, a KV token and a partial result: ``[3, n]``, for shape indices ``[n]``."""
    costs = [(each.tile_us, each.kilotoken_us / 1000, each.partial_us) for each in launch.shapes]
    found: Floats = np.array(costs).T[:, shape]
    return found


def cheapest(costs: Floats) -> tuple[Ints, Floats]:
    """The index of the cheaper shape, the first on ties, and its cost, from costs ``[L, 2, n]`` of the two shapes."""
    narrow, wide = costs[:, 0], costs[:, 1]
    return (wide < narrow).astype(np.int64), np.minimum(narrow, wide)


def pick(shape: Ints, values: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """Selects from values ``[L, 2, n]`` of the two shapes by shape index: ``[L, n]``."""
    return np.where(shape == 0, values[:, 0], values[:, 1])
