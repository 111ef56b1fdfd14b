"""What attention tiles cost, and from it which tile shape a query takes and which prefixes are worth sharing.

Costs are in microseconds of one program slot: tile_us a tile, and per 1,000 KV tokens a rate that is lower where
another program has just read them. Sharing a group's prefix saves each member its own reading of it, and costs the
prefix tiles and two partial results per row instead of one result. So a short prefix or one with few members is not
shared, and neither are the rows of a long prompt chunk, which fill the rows of a tile by themselves (BatchLLM section
6.3.3 reports such cases as lost; here they fall back to paged attention: the same tiles at the same cost).

All arrays are per sequence ``[S]`` or per group ``[G]``; no loop runs over either.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from engine.kernels import cdiv
from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.triton.tuned import Launch, TileShape

SharePolicy = Literal["fused", "paged", "relay"]
"""Which prefixes become prefix tiles: those that gain (fused), none (paged), or all (relay)."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How one step is cut into tiles under one launch.

    Attributes:
        is_shared: bool ``[S]``, whether a sequence's rows meet its group's prefix in prefix tiles.
        own_shape, prefix_shape: index into launch.shapes, ``[S]`` and ``[G]``.
        total_us: of all tiles of one KV head, before any split.
    """

    launch: Launch
    is_shared: npt.NDArray[np.bool_]
    own_shape: Ints
    prefix_shape: Ints
    total_us: float


def tile_us(
    shape: TileShape, num_tiles: Ints | int, fresh_tokens: Ints | Floats, reread_tokens: Ints | Floats | int
) -> Floats:
    """Slot time of tiles in microseconds.

    Args:
        shape: what a tile costs.
        num_tiles: tiles of each sequence or group, ``[S]`` or ``[G]``.
        fresh_tokens: KV tokens that all of these tiles read from memory.
        reread_tokens: KV tokens that they read from L2.
    """
    memory_us = fresh_tokens * (shape.kilotoken_us / 1000)
    return memory_us + (num_tiles * shape.tile_us + reread_tokens * (shape.reread_kilotoken_us / 1000))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """What the cost of a step's tiles depends on, the same for every launch.

    Attributes:
        num_rows, suffix_lens, prefix: int64 ``[S]``, rows of a sequence, its own KV tokens and its prefix's.
        group: int64 ``[S]``, of each sequence.
        prefix_lens: int64 ``[G]``.
        is_decode: every sequence has one row.
    """

    num_rows: Ints
    suffix_lens: Ints
    prefix: Ints
    group: Ints
    prefix_lens: Ints
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
            is_decode=batch.num_rows == len(batch.suffix_lens),
        )

    def count_own_tiles(self, tokens: int) -> tuple[Ints | int, Ints | int]:
        """Of each sequence: its tiles of `tokens` rows, and own KV tokens that they read after the first that does."""
        if self.is_decode:
            return 1, 0
        num_tiles = cdiv(self.num_rows, tokens)
        # Tile i of a chunk reads up to its own last row: earlier tokens, and (i + 1) * tokens of the chunk.
        earlier = (num_tiles - 1) * (self.suffix_lens - self.num_rows)
        return num_tiles, earlier + tokens * (num_tiles * (num_tiles - 1) // 2)


def choose(sizes: StepSizes, launch: Launch, *, group_size: int, policy: SharePolicy, share_margin: float) -> Choice:
    """The cheapest cut of a step under one launch.

    Args:
        sizes: of the step.
        launch: the tile shapes to choose from.
        group_size: query heads of a KV head.
        policy: which prefixes become prefix tiles; see `SharePolicy`.
        share_margin: by how much sharing a prefix must be cheaper than paged attention, as a share of its cost.
    """
    num_rows, prefix, group, prefix_lens = sizes.num_rows, sizes.prefix, sizes.group, sizes.prefix_lens
    num_groups = len(prefix_lens)
    own_us, paged_us, prefix_row_us, partial_us = [], [], [], []
    for shape in launch.shapes:
        tokens = shape.rows // group_size
        num_tiles, reread_tokens = sizes.count_own_tiles(tokens)
        read_us = prefix * (shape.reread_kilotoken_us / 1000)
        own = tile_us(shape, num_tiles, sizes.suffix_lens, reread_tokens)
        own_us.append(own)
        paged_us.append(own + num_tiles * read_us)
        prefix_row_us.append(read_us * num_rows / tokens)
        partial_us.append(num_tiles * shape.partial_us)
    (own_shape, own_best), (paged_shape, paged_best) = _cheapest(own_us), _cheapest(paged_us)
    own_best = own_best + np.where(own_shape == 0, partial_us[0], partial_us[-1])
    gain = paged_best - own_best
    # Rows that cost the prefix tiles more than they save go on alone, whatever the rest of the group does.
    is_candidate = (prefix > 0) & (gain > _cheapest(prefix_row_us)[1])
    if policy == "relay":
        is_candidate = prefix > 0
    shared_rows = np.bincount(group, weights=num_rows * is_candidate, minlength=num_groups).astype(np.int64)
    group_us = []
    for shape in launch.shapes:
        num_tiles = cdiv(shared_rows, shape.rows // group_size)
        once = tile_us(shape, num_tiles, prefix_lens, np.maximum(num_tiles - 1, 0) * prefix_lens)
        group_us.append(once + num_tiles * shape.partial_us)
    prefix_shape, prefix_best = _cheapest(group_us)
    group_gain = np.bincount(group, weights=gain * is_candidate, minlength=num_groups)
    # Paged attention reads a prefix from memory once too: its first reader pays the difference.
    first_read_us = prefix_lens * (launch.narrow.kilotoken_us - launch.narrow.reread_kilotoken_us) / 1000
    is_worth_it = group_gain + first_read_us > prefix_best * (1 + share_margin)
    if policy != "fused":
        is_worth_it = np.full(num_groups, policy == "relay")
    is_shared = is_candidate & is_worth_it[group]
    is_group_shared = np.bincount(group, weights=is_shared, minlength=num_groups) > 0
    total_us = np.where(is_shared, own_best, paged_best).sum()
    total_us += np.where(is_group_shared, prefix_best, first_read_us).sum()
    return Choice(
        launch=launch,
        is_shared=is_shared,
        own_shape=np.where(is_shared, own_shape, paged_shape),
        prefix_shape=prefix_shape,
        total_us=float(total_us),
    )


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
