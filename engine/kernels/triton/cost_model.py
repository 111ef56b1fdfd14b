"""Predicts the time of an attention step, and chooses by it tile shapes, shared prefixes, and splits of KV ranges.

A launch takes `start_us`, plus the time of its program slots or of its memory reads, whichever is longer:

    slots:   rounds * mean tile, but not less than the longest tile; rounds = ceil(tiles / slots)
    memory:  KV tokens read, at one rate from memory and at another where another program has just read them

A tile takes `tile_us`, a rate per KV token, and `partial_us` if its result is partial. Sharing a group's prefix saves
each member its own reading of it, and costs the prefix tiles and two partial results per row in place of one result. So
a prefix that is short or has few members is not shared, nor are the rows of a long prompt chunk, which fill the rows of
a tile by themselves (BatchLLM section 6.3.3 reports such cases as slower; here they use paged attention, with the same
tiles at the same cost). KV ranges are split where that fills the slots: in a step of few tiles the longest tile
determines the time.

Arrays are per sequence ``[S]`` or per group ``[G]``, with a leading dimension for launches; no Python loop runs over
sequences or groups.
"""

import math
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

import numpy as np
import numpy.typing as npt

from engine.kernels import cdiv
from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.triton.tile_ranges import MOST_ROUNDS, Floats, Ints, Number, Ranges, Rates, cheapest, pick
from engine.kernels.triton.tuned import Launch, TunedAttention

SharePolicy = Literal["fused", "paged", "relay"]
"""Which prefixes are shared: those for which the cost model predicts a gain (fused), none (paged), or all (relay)."""

SHARE_MARGIN = 0.05
"""The share of a step's time that sharing must save to be preferred to paged attention: the cost model's error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How one step is split into tiles.

    Attributes:
        is_shared: bool ``[S]``, whether prefix tiles compute the prefix part of a sequence's rows.
        own_shape, prefix_shape: index into launch.shapes, ``[S]`` and ``[G]``.
        step_us: predicted time of the step.
        longest_us: tiles that take longer are split.
        slot_us: mean busy time of a program slot.
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
    """The sizes of a step that determine the cost of its tiles, for any launch.

    Attributes:
        num_rows, suffix_lens, prefix: int64 ``[S]``, each sequence's rows, own KV tokens and prefix KV tokens.
        group: int64 ``[S]``, the group of each sequence.
        prefix_lens: int64 ``[G]``.
        num_tokens: KV tokens of the step, counting each prefix once.
    """

    num_rows: Ints
    suffix_lens: Ints
    prefix: Ints
    group: Ints
    prefix_lens: Ints
    num_tokens: int

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
        )

    def sum_by_group(self, values: npt.NDArray[Number]) -> Floats:
        """Sums values ``[L, S]`` over the sequences of each group: ``[L, G]``."""
        num_groups = len(self.prefix_lens)
        index = self.group + num_groups * np.arange(len(values))[:, None]
        sums = np.bincount(index.ravel(), weights=values.ravel(), minlength=num_groups * len(values))
        return sums.reshape(-1, num_groups).astype(np.float64, copy=False)

    def own_tiles(self, tokens: Ints) -> tuple[Ints, Ints]:
        """The number of own tiles of each sequence, and the own KV tokens that they read in total, ``[..., S]``, for
        tiles with int64 ``[..., 1]`` rows of the batch."""
        num_tiles = cdiv(self.num_rows, tokens)
        # Tile i of a chunk reads the earlier tokens and the first (i + 1) * tokens tokens of the chunk.
        earlier = (num_tiles - 1) * (self.suffix_lens - self.num_rows)
        return num_tiles, self.suffix_lens + earlier + tokens * (num_tiles * (num_tiles - 1) // 2)


def choose(
    sizes: StepSizes, tuned: TunedAttention, *, group_size: int, num_kv_heads: int, policy: SharePolicy
) -> Choice:
    """The fastest way, over the device's launches, to split a step into tiles.

    Args:
        tuned: the device's launches, their costs, and its number of processors.
        group_size: query heads per KV head.
        policy: which prefixes are shared; see `SharePolicy`.
    """
    rates, launches = Rates.of(tuned.launches, group_size), tuned.launches
    num_tiles, num_read = sizes.own_tiles(rates.tokens)
    own_us = num_tiles * rates.tile_us + num_read * rates.token_us
    prefix_us = sizes.prefix * rates.token_us
    own_shape, own_best_us = cheapest(own_us)
    paged_shape, paged_us = cheapest(own_us + num_tiles * prefix_us)
    shared_us = own_best_us + pick(own_shape, num_tiles * rates.partial_us)
    gain_us = paged_us - shared_us
    # A sequence that costs the prefix tiles more than it saves is not shared, even if the rest of its group is.
    is_candidate = gain_us > cheapest(prefix_us * (sizes.num_rows / rates.tokens))[1]
    if policy == "relay":
        is_candidate = np.ones_like(is_candidate)
    is_candidate &= sizes.prefix > 0
    prefixes = _prefix_ranges(sizes, rates, is_candidate)
    is_worth_it = sizes.sum_by_group(gain_us * is_candidate) > prefixes.total_us
    if policy == "relay":
        is_worth_it[:] = True
    cuts = [] if policy == "relay" else [np.zeros_like(is_candidate)]
    if policy != "paged":
        cuts.append(is_candidate & is_worth_it[:, sizes.group])
    found: list[list[Choice]] = [[] for _ in launches]
    for is_shared in cuts:
        shape, seen = np.where(is_shared, own_shape, paged_shape), np.where(is_shared, 0, sizes.prefix)
        cut_tiles = pick(shape, num_tiles)
        ranges = Ranges(
            shape=shape, num_tiles=cut_tiles, num_read=pick(shape, num_read) + cut_tiles * seen,
            longest=sizes.suffix_lens + seen, is_partial=is_shared, total_us=np.where(is_shared, shared_us, paged_us),
        )  # fmt: skip
        if is_shared.any():
            ranges = ranges.followed_by(prefixes.where(is_worth_it))
        for number, (launch, num_all, num_all_read, total_us) in enumerate(
            zip(launches, *ranges.totals(), strict=True)
        ):
            slots_a_head = tuned.num_processors * launch.programs_per_processor / num_kv_heads
            slot_us = longest_us = total_us / slots_a_head
            if num_all > MOST_ROUNDS * slots_a_head:
                slots_us = math.ceil(num_all / slots_a_head) / num_all * total_us
            else:
                slots_us, longest_us = ranges.split(number, launch, slots_a_head, tuned.min_split_tokens)
            num_reread = max(num_all_read - sizes.num_tokens, 0)
            memory_us = sizes.num_tokens * tuned.memory_kilotoken_us + num_reread * tuned.l2_kilotoken_us
            found[number].append(
                Choice(
                    launch=launch, is_shared=is_shared[number], own_shape=shape[number],
                    prefix_shape=prefixes.shape[number], longest_us=longest_us,
                    step_us=tuned.start_us + max(slots_us, num_kv_heads * memory_us / 1000),
                    slot_us=slot_us,
                )
            )  # fmt: skip
    preferred = (each[-1] if each[-1].step_us < each[0].step_us * (1 - SHARE_MARGIN) else each[0] for each in found)
    return min(preferred, key=attrgetter("step_us"))


def _prefix_ranges(sizes: StepSizes, rates: Rates, is_shared: npt.NDArray[np.bool_]) -> Ranges:
    """The prefix tiles of each group in their cheapest shape, ``[L, G]``; see `Choice.is_shared`."""
    rows = sizes.sum_by_group(sizes.num_rows * is_shared).astype(np.int64)
    all_tiles = cdiv(rows[:, None], rates.tokens)
    range_us = rates.tile_us + sizes.prefix_lens * rates.token_us + rates.partial_us
    shape, total_us = cheapest(all_tiles * range_us)
    num_tiles = pick(shape, all_tiles)
    return Ranges(
        shape=shape, num_tiles=num_tiles, num_read=num_tiles * sizes.prefix_lens,
        longest=np.where(num_tiles > 0, sizes.prefix_lens, 0), is_partial=num_tiles > 0, total_us=total_us,
    )  # fmt: skip


def sizes_of(starts: npt.NDArray[np.int32]) -> Ints:
    """The sizes ``[n]`` of consecutive ranges, from their starts ``[n + 1]``, the last of which is the end."""
    wide = starts.astype(np.int64)
    return wide[1:] - wide[:-1]
