"""What attention steps cost, and from it which tile shape a query takes, which prefixes are shared, what is split.

A launch takes `start_us`, and then as long as its program slots or the memory take, whichever is longer:

    slots:   rounds * mean tile, but not less than the longest tile; rounds = ceil(tiles / slots)
    memory:  the KV tokens read, at one rate where they come from memory, at another where a program has just read them

A tile takes `tile_us`, a rate per KV token, and `partial_us` where its result is a partial one. Sharing a group's
prefix saves each member its own reading of it, and costs the prefix tiles and two partial results per row instead of
one result. So a short prefix or one with few members is not shared, and neither are the rows of a long prompt chunk,
which fill the rows of a tile by themselves (BatchLLM section 6.3.3 reports such cases as lost; here they fall back to
paged attention: the same tiles at the same cost). Ranges of KV are split where that fills the slots: in a step of few
tiles the longest one is all of its time.

Arrays are per sequence ``[S]`` or per group ``[G]``; no loop runs over either.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from engine.kernels import cdiv
from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.triton.tuned import Launch, TileShape, TunedAttention

SharePolicy = Literal["fused", "paged", "relay"]
"""Which prefixes become prefix tiles: those that gain (fused), none (paged), or all (relay)."""

SHARE_MARGIN = 0.04
"""By how much sharing must shorten a step to be preferred to paged attention: less is within the cost model's error."""

MOST_ROUNDS = 4
"""Ranges are not split into more tiles than the program slots take in so many rounds."""

_SPLITS = np.array([1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32])[:, None]
"""Parts of the longest range that are tried."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_Number = TypeVar("_Number", bound=np.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How one step is cut into tiles under one launch.

    Attributes:
        is_shared: bool ``[S]``, whether a sequence's rows meet its group's prefix in prefix tiles.
        own_shape, prefix_shape: index into launch.shapes, ``[S]`` and ``[G]``.
        step_us: of the whole step.
        longest_us: a tile that takes longer is split.
        slot_us: how long a program slot is busy in the mean.
    """

    launch: Launch
    is_shared: npt.NDArray[np.bool_]
    own_shape: Ints
    prefix_shape: Ints
    step_us: float
    longest_us: float
    slot_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """What the cost of a step's tiles depends on, the same for every launch.

    Attributes:
        num_rows, suffix_lens, prefix: int64 ``[S]``, rows of a sequence, its own KV tokens and its prefix's.
        group: int64 ``[S]``, of each sequence.
        prefix_lens: int64 ``[G]``.
        num_tokens: of KV, each prefix once.
        is_decode: every sequence has one row.
    """

    num_rows: Ints
    suffix_lens: Ints
    prefix: Ints
    group: Ints
    prefix_lens: Ints
    num_tokens: int
    is_decode: bool

    @classmethod
    def of(cls, batch: AttentionBatch) -> "StepSizes":
        group = np.repeat(np.arange(batch.num_groups), sizes_of(batch.group_starts))
        prefix_lens = batch.prefix_lens.astype(np.int64)
        return cls(
            num_rows=sizes_of(batch.cu_seqlens_q),
            suffix_lens=batch.suffix_lens.astype(np.int64),
            prefix=prefix_lens[group],
            group=group,
            prefix_lens=prefix_lens,
            num_tokens=int(batch.suffix_lens.sum() + prefix_lens.sum()),
            is_decode=batch.num_rows == len(batch.suffix_lens),
        )

    def own_tiles(self, tokens: int) -> tuple[Ints, Ints]:
        """Of each sequence: its tiles of `tokens` rows, and own KV tokens that they read in all."""
        if self.is_decode:
            return self.num_rows, self.suffix_lens
        num_tiles = cdiv(self.num_rows, tokens)
        # Tile i of a chunk reads up to its own last row: earlier tokens, and (i + 1) * tokens of the chunk.
        earlier = (num_tiles - 1) * (self.suffix_lens - self.num_rows)
        return num_tiles, self.suffix_lens + earlier + tokens * (num_tiles * (num_tiles - 1) // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """Tiles before their KV ranges are split, by sequence ``[S]`` or group ``[G]``.

    Attributes:
        shape: index into the launch's shapes.
        num_tiles: with one range each.
        num_read: KV tokens that all of them read.
        longest: KV tokens that the longest of them reads.
        is_partial: their results are partial, split or not.
        total_us: slot time of all.
    """

    shape: Ints
    num_tiles: Ints
    num_read: Ints
    longest: Ints
    is_partial: npt.NDArray[np.bool_]
    total_us: Floats

    def where(self, is_kept: npt.NDArray[np.bool_]) -> "Ranges":
        """These ranges, without tiles where they are not kept ``[n]``."""
        return Ranges(
            shape=self.shape, num_tiles=self.num_tiles * is_kept, num_read=self.num_read * is_kept,
            longest=self.longest * is_kept, is_partial=self.is_partial & is_kept, total_us=self.total_us * is_kept,
        )  # fmt: skip

    def followed_by(self, others: "Ranges") -> "Ranges":
        """These ranges, then the others."""
        return Ranges(
            **{name: np.concatenate([getattr(self, name), getattr(others, name)]) for name in Ranges.__slots__}
        )

    def split(self, launch: Launch, slots_a_head: float, min_split_tokens: int) -> tuple[float, float, float]:
        """What the slots take, what the longest tile may take for it, and what a slot takes in the mean; microseconds.

        Where tiles fill the slots more than `MOST_ROUNDS` times, a tile may take as long as a slot is busy in the mean.
        Else several ways to split the longest ranges are compared.

        Args:
            slots_a_head: program slots for each KV head.
            min_split_tokens: KV tokens that a part holds at least.
        """
        num_tiles, total_us = int(self.num_tiles.sum()), float(self.total_us.sum())
        slot_us = total_us / slots_a_head
        if num_tiles > MOST_ROUNDS * slots_a_head:
            return np.ceil(num_tiles / slots_a_head) / num_tiles * total_us, slot_us, slot_us
        tile_us, token_us, partial_us = slot_costs(launch, self.shape)
        range_us = tile_us + token_us * self.longest
        most = np.maximum(self.longest // min_split_tokens, 1)
        splits = _SPLITS if most.max() > 1 else _SPLITS[:1]
        longest_us = range_us.max() / splits * (1 + 1e-9)
        parts = np.minimum(np.ceil(range_us / longest_us), most)
        is_partial = self.is_partial | (parts > 1)
        added_us = tile_us * (parts - 1) + partial_us * (is_partial * parts - self.is_partial)
        numbers = (self.num_tiles * parts).sum(1)
        rounds = np.ceil(numbers / slots_a_head)
        longest_tile_us = (tile_us + token_us * self.longest / parts + partial_us * is_partial).max(1)
        slots_us = np.maximum(rounds / numbers * (total_us + (self.num_tiles * added_us).sum(1)), longest_tile_us)
        slots_us[1:][rounds[1:] > MOST_ROUNDS] = np.inf
        best = int(slots_us.argmin())
        return float(slots_us[best]), float(longest_us[best, 0]), slot_us


def choose(
    sizes: StepSizes,
    launch: Launch,
    tuned: TunedAttention,
    *,
    group_size: int,
    num_kv_heads: int,
    num_processors: int,
    policy: SharePolicy,
) -> Choice:
    """The cheapest cut of a step under one launch.

    Args:
        sizes: of the step.
        launch: the tile shapes to choose from.
        tuned: the device's costs.
        group_size: query heads of a KV head.
        num_processors: of the device.
        policy: which prefixes become prefix tiles; see `SharePolicy`.
    """
    num_rows, prefix, group, prefix_lens = sizes.num_rows, sizes.prefix, sizes.group, sizes.prefix_lens
    own_tiles = [sizes.own_tiles(shape.rows // group_size) for shape in launch.shapes]
    own_us, paged_us, prefix_row_us, partial_us = [], [], [], []
    for shape, (num_tiles, num_read) in zip(launch.shapes, own_tiles, strict=True):
        read_us = prefix * (shape.kilotoken_us / 1000)
        own = _tiles_us(shape, num_tiles, num_read)
        own_us.append(own)
        paged_us.append(own + num_tiles * read_us)
        prefix_row_us.append(read_us * num_rows / (shape.rows // group_size))
        partial_us.append(num_tiles * shape.partial_us)
    (own_shape, own_best), (paged_shape, paged_best) = _cheapest(own_us), _cheapest(paged_us)
    shared_us = own_best + _pick(own_shape, partial_us)
    gain = paged_best - shared_us
    # Rows that cost the prefix tiles more than they save go on alone, whatever the rest of the group does.
    is_candidate = (prefix > 0) & (gain > _cheapest(prefix_row_us)[1])
    if policy == "relay":
        is_candidate = prefix > 0
    prefixes = _prefix_ranges(sizes, launch, is_candidate, group_size)
    is_worth_it = np.bincount(group, weights=gain * is_candidate, minlength=len(prefix_lens)) > prefixes.total_us
    is_worth_it |= policy == "relay"
    shared = is_candidate & is_worth_it[group]
    none = np.zeros_like(shared)
    cuts = {"paged": [none], "relay": [shared], "fused": [none, shared] if shared.any() else [none]}
    slots_a_head = num_processors * launch.programs_per_processor / num_kv_heads
    found = []
    for is_shared in cuts[policy]:
        cut_shape = np.where(is_shared, own_shape, paged_shape)
        num_tiles, num_read = (_pick(cut_shape, each) for each in zip(*own_tiles, strict=True))
        seen = np.where(is_shared, 0, prefix)
        ranges = Ranges(
            shape=cut_shape, num_tiles=num_tiles, num_read=num_read + num_tiles * seen,
            longest=sizes.suffix_lens + seen, is_partial=is_shared, total_us=np.where(is_shared, shared_us, paged_best),
        )  # fmt: skip
        if is_shared.any():
            ranges = ranges.followed_by(prefixes.where(is_worth_it))
        slots_us, longest_us, slot_us = ranges.split(launch, slots_a_head, tuned.min_split_tokens)
        num_reread = max(int(ranges.num_read.sum()) - sizes.num_tokens, 0)
        memory_us = sizes.num_tokens * tuned.memory_kilotoken_us + num_reread * tuned.l2_kilotoken_us
        found.append(
            Choice(
                launch=launch, is_shared=is_shared, own_shape=cut_shape, prefix_shape=prefixes.shape,
                step_us=tuned.start_us + max(slots_us, num_kv_heads * memory_us / 1000),
                longest_us=longest_us, slot_us=slot_us,
            )
        )  # fmt: skip
    return found[-1] if found[-1].step_us < found[0].step_us * (1 - SHARE_MARGIN) else found[0]


def _prefix_ranges(sizes: StepSizes, launch: Launch, is_shared: npt.NDArray[np.bool_], group_size: int) -> Ranges:
    """Of each group's prefix, in the cheapest shape; see `Choice.is_shared`."""
    rows = np.bincount(sizes.group, weights=sizes.num_rows * is_shared, minlength=len(sizes.prefix_lens))
    all_tiles, group_us = [], []
    for shape in launch.shapes:
        num_tiles = cdiv(rows.astype(np.int64), shape.rows // group_size)
        all_tiles.append(num_tiles)
        group_us.append(_tiles_us(shape, num_tiles, num_tiles * sizes.prefix_lens) + num_tiles * shape.partial_us)
    shape_index, total_us = _cheapest(group_us)
    num_tiles = _pick(shape_index, all_tiles)
    return Ranges(
        shape=shape_index, num_tiles=num_tiles, num_read=num_tiles * sizes.prefix_lens,
        longest=np.where(num_tiles > 0, sizes.prefix_lens, 0), is_partial=num_tiles > 0, total_us=total_us,
    )  # fmt: skip


def slot_costs(launch: Launch, shape: Ints) -> Floats:
    """``[3, n]``: slot time in microseconds of a tile, a KV token, a partial result, by index of shape ``[n]``."""
    costs = [(each.tile_us, each.kilotoken_us / 1000, each.partial_us) for each in launch.shapes]
    found: Floats = np.array(costs).T[:, shape]
    return found


def _tiles_us(shape: TileShape, num_tiles: Ints, num_tokens: Ints) -> Floats:
    """Slot time in microseconds of tiles that read so many KV tokens in all, partial results not counted."""
    found: Floats = num_tiles * shape.tile_us + num_tokens * (shape.kilotoken_us / 1000)
    return found


def sizes_of(starts: npt.NDArray[np.int32]) -> Ints:
    """``[n]`` sizes of the consecutive ranges that begin, and at last end, at ``[n + 1]`` starts."""
    wide = starts.astype(np.int64)
    return wide[1:] - wide[:-1]


def _cheapest(costs: Sequence[Floats]) -> tuple[Ints, Floats]:
    """Of a few arrays, element by element: the index of the first with the least value, and that value."""
    index, best = np.zeros(len(costs[0]), dtype=np.int64), costs[0]
    for number, cost in enumerate(costs[1:], 1):
        index[cost < best] = number
        best = np.minimum(best, cost)
    return index, best


def _pick(shape: Ints, arrays: Sequence[npt.NDArray[_Number]]) -> npt.NDArray[_Number]:
    """Element by element, the array of that shape's number; there are one or two."""
    return arrays[0] if arrays[0] is arrays[-1] else np.where(shape == 0, arrays[0], arrays[-1])
