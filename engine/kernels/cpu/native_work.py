"""One step's attention, split into work items for the CPU kernels."""

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels import cdiv
from engine.kernels.attention_batch import AttentionBatch

Ints = npt.NDArray[np.int64]

SUB_BLOCK_TOKENS = 32
"""Tokens of a sub-block, the unit of the KV layout in cpp/attention.h; block sizes are multiples of it."""

TILE_ROWS = 32
"""Query rows of one work item, where a token has a row for each query head of the KV head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeWork:
    """One step's attention, prepared once and used by every layer. A thread computes an item for one KV head at a time.

    Attributes:
        slots: int64 ``[T]``, where each row's key and value are written.
        shared: int64 ``[n, 4]``, items of rows of several sequences of a group against their prefix, which is read
            once for all of them: first row, number of rows, start in prefix_blocks, prefix tokens.
        own: int64 ``[m, 7]``, items of rows of one sequence: first row, number of rows, start in own_blocks, own tokens
            that the first row sees, start in prefix_blocks, prefix tokens, tokens that shared items have covered. With
            a `shared_unit` these include the own tokens in the prefix's last, partial unit.
        prefix_blocks, own_blocks: int32 block tables.
        own_seen: int32 ``[T]``, own tokens that each row sees; a window's start is computed from it.
        state: float32 scratch memory, in which shared items leave their partial results for own items.
    """

    slots: Ints
    shared: Ints
    own: Ints
    prefix_blocks: npt.NDArray[np.int32]
    own_blocks: npt.NDArray[np.int32]
    own_seen: npt.NDArray[np.int32]
    state: torch.Tensor = field(default_factory=lambda: torch.empty(0))


class AttentionShape:
    """The attention shape of one model.

    Args:
        block_size: tokens in a KV block, a multiple of 32.
        shared_unit: see `cut_rows`.
    Raises:
        ValueError: the shape is not supported.
    """

    def __init__(
        self, *, num_q_heads: int, num_kv_heads: int, head_dim: int, block_size: int, shared_unit: int = 1
    ) -> None:
        if block_size % SUB_BLOCK_TOKENS:
            raise ValueError(f"block_size {block_size} is not a multiple of {SUB_BLOCK_TOKENS}")
        if head_dim % 16 or head_dim > 256:
            raise ValueError(f"head dim {head_dim} is not a multiple of 16 up to 256")
        if num_q_heads // num_kv_heads > TILE_ROWS:
            raise ValueError(f"{num_q_heads // num_kv_heads} query heads a KV head are more than {TILE_ROWS}")
        self.num_q_heads, self.num_kv_heads, self.head_dim = num_q_heads, num_kv_heads, head_dim
        self.block_size = block_size
        self._shared_unit = shared_unit
        self._tile_tokens = TILE_ROWS * num_kv_heads // num_q_heads
        self._state = torch.empty(0)

    def prepare(self, batch: AttentionBatch) -> NativeWork:
        """Splits a step's rows into items. Called once per step."""
        work = cut_rows(batch, self._tile_tokens, self._shared_unit)
        size = batch.num_rows * self.num_q_heads * (self.head_dim + 2) if len(work.shared) else 0
        if self._state.numel() < size:
            self._state = torch.empty(size)
        return replace(work, state=self._state)


def cut_rows(batch: AttentionBatch, tile_tokens: int, shared_unit: int = 1) -> NativeWork:
    """Splits a step's rows into items of at most tile_tokens rows.

    Sequences of a group with few rows share items for their prefix. A sequence with enough rows to fill an item attends
    to its prefix and its own KV in the same item.

    Args:
        tile_tokens: most rows of an item.
        shared_unit: tokens: shared items cover whole units, up to the one in which own tokens begin, included.
    """
    num_rows = np.diff(batch.cu_seqlens_q).astype(np.int64)
    group_of = np.repeat(np.arange(batch.num_groups), np.diff(batch.group_starts))
    prefix_len = batch.prefix_lens[group_of].astype(np.int64)
    shared_lens = batch.prefix_lens.astype(np.int64) // shared_unit * shared_unit
    covered_lens = shared_lens if shared_unit == 1 else shared_lens + shared_unit
    is_short = (num_rows < tile_tokens) & (prefix_len > 0)
    # A group's only short sequence needs no shared item.
    num_short = np.bincount(group_of, weights=is_short, minlength=batch.num_groups)
    is_short &= num_short[group_of] > 1
    own_sequence, own_offset, own_count = _cut(num_rows, tile_tokens)
    first_visible = batch.suffix_lens.astype(np.int64) - num_rows + 1
    first_seen = first_visible - batch.cu_seqlens_q[:-1]
    own = np.stack(
        [
            batch.cu_seqlens_q[own_sequence] + own_offset,
            own_count,
            batch.suffix_block_starts[own_sequence],
            first_visible[own_sequence] + own_offset,
            batch.prefix_block_starts[group_of[own_sequence]],
            prefix_len[own_sequence],
            np.where(is_short, covered_lens[group_of], 0)[own_sequence],
        ],
        axis=1,
        dtype=np.int64,
    )
    cost = own[:, 1] * (own[:, 3] + own[:, 5] - own[:, 6])
    return NativeWork(
        slots=np.ascontiguousarray(batch.slot_mapping),
        shared=_shared_items(batch, group_of, is_short, shared_lens, tile_tokens),
        own=np.ascontiguousarray(own[np.argsort(-cost, kind="stable")]),
        prefix_blocks=np.ascontiguousarray(batch.prefix_block_ids),
        own_blocks=np.ascontiguousarray(batch.suffix_block_table),
        own_seen=np.arange(batch.num_rows, dtype=np.int32) + np.repeat(first_seen, num_rows).astype(np.int32),
    )


def _shared_items(
    batch: AttentionBatch, group_of: Ints, is_short: npt.NDArray[np.bool_], shared_lens: Ints, tile_tokens: int
) -> Ints:
    """Items of the rows of consecutive short sequences of a group."""
    is_next_same = is_short[1:] & is_short[:-1] & (group_of[1:] == group_of[:-1])
    starts = is_short & ~np.concatenate([[False], is_next_same])
    ends = is_short & ~np.concatenate([is_next_same, [False]])
    first = batch.cu_seqlens_q[:-1][starts].astype(np.int64)
    run_rows = batch.cu_seqlens_q[1:][ends] - first
    run, offset, count = _cut(run_rows, tile_tokens)
    group = group_of[starts][run]
    items = [first[run] + offset, count, batch.prefix_block_starts[group], shared_lens[group]]
    shared = np.stack(items, axis=1, dtype=np.int64)
    return np.ascontiguousarray(shared[np.argsort(-shared[:, 1] * shared[:, 3], kind="stable")])


def _cut(lengths: Ints, most: int) -> tuple[Ints, Ints, Ints]:
    """Splits ranges into pieces of at most `most`. Of each piece: the index of its range, its offset, its length."""
    num_pieces = cdiv(lengths, most)
    index = np.repeat(np.arange(len(lengths)), num_pieces)
    offset = (np.arange(len(index)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)) * most
    return index, offset, np.minimum(lengths[index] - offset, most)
