"""Splits one step's attention into work items for the CPU kernels."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels import cdiv
from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.cpu.layer_structures import NativeWork, ShapeStructure

Ints = npt.NDArray[np.int64]

SUB_BLOCK_TOKENS = 32
"""Tokens of a sub-block, the unit of the KV layout in cpp/attention.h; block sizes are multiples of it."""

TILE_ROWS = 32
"""Query rows of one work item, where a token has a row for each query head of the KV head."""


class AttentionShape:
    """The attention shape of one model. Raises `ValueError` if it is not supported.

    Args:
        block_size: tokens in a KV block, a multiple of 32.
        shared_unit: tokens; 1: shared items cover the prefix. Else they cover whole units of it, and the next unit, in
            which own tokens begin.

    Attributes:
        library, suffix: compiled kernels, and of the names of their functions the end, which tells the format.
        dtype: of rows.
    """

    library: ctypes.CDLL
    suffix: str
    dtype: torch.dtype

    def __init__(
        self, *, num_q_heads: int, num_kv_heads: int, head_dim: int, block_size: int, shared_unit: int = 1
    ) -> None:
        if block_size % SUB_BLOCK_TOKENS:
            raise ValueError(f"block_size {block_size} is not a multiple of {SUB_BLOCK_TOKENS}")
        if head_dim % 16 or head_dim > 256:
            raise ValueError(f"head dim {head_dim} is not a multiple of 16 up to 256")
        if num_q_heads % num_kv_heads or num_q_heads // num_kv_heads > TILE_ROWS:
            raise ValueError(f"{num_q_heads / num_kv_heads:g} query heads a KV head are no whole number to {TILE_ROWS}")
        self.num_q_heads, self.num_kv_heads, self.head_dim = num_q_heads, num_kv_heads, head_dim
        self.block_size = block_size
        self.structure = ShapeStructure(num_q_heads, num_kv_heads, head_dim, block_size)
        self._shared_unit = shared_unit
        self._tile_tokens = TILE_ROWS * num_kv_heads // num_q_heads
        self._state = torch.empty(0, dtype=torch.float32)

    def kernel(self, name: str) -> Callable[..., Any]:
        """The function of this name for the format."""
        return getattr(self.library, f"{name}_{self.suffix}")  # type: ignore[no-any-return]

    def new_rows(self, num_rows: int, num_columns: int) -> torch.Tensor:
        """Uninitialised ``[num_rows, num_columns]``, allocated for whole tiles of rows, which the kernels read."""
        return torch.empty(cdiv(num_rows, TILE_ROWS) * TILE_ROWS, num_columns, dtype=self.dtype)[:num_rows]

    def prepare(self, batch: AttentionBatch) -> NativeWork:
        """Splits a step's rows into items of at most TILE_ROWS query rows. Sequences of a group with few rows share
        items for their prefix; one that fills an item attends to its prefix and its own KV in the same item."""
        num_rows = np.diff(batch.cu_seqlens_q).astype(np.int64)
        group = np.repeat(np.arange(batch.num_groups), np.diff(batch.group_starts))
        prefix_lens = batch.prefix_lens.astype(np.int64)
        shared_lens = prefix_lens // self._shared_unit * self._shared_unit
        covered_lens = shared_lens if self._shared_unit == 1 else shared_lens + self._shared_unit
        is_short = (num_rows < self._tile_tokens) & (prefix_lens[group] > 0)
        # A group's only short sequence needs no shared item.
        is_short &= np.bincount(group, weights=is_short, minlength=batch.num_groups)[group] > 1
        shared = self._shared_items(batch, group, is_short, shared_lens)
        size = batch.num_rows * self.num_q_heads * (self.head_dim + 2) if len(shared) else 0
        if self._state.numel() < size:
            self._state = torch.empty(size, dtype=torch.float32)
        first_visible = batch.suffix_lens.astype(np.int64) - num_rows + 1
        first_seen = first_visible - batch.cu_seqlens_q[:-1]
        sequence, offset, count = _cut(num_rows, self._tile_tokens)
        visible, prefix_len = first_visible[sequence] + offset, prefix_lens[group][sequence]
        covered = np.where(is_short, covered_lens[group], 0)[sequence]
        first_row, table_start = batch.cu_seqlens_q[sequence] + offset, batch.suffix_block_starts[sequence]
        own = [first_row, count, table_start, visible, batch.prefix_block_starts[group[sequence]], prefix_len, covered]
        own_seen = np.arange(batch.num_rows, dtype=np.int32) + np.repeat(first_seen, num_rows).astype(np.int32)
        items = shared, _longest_first(own, cost=count * (visible + prefix_len - covered))
        given = batch.slot_mapping, *items, batch.prefix_block_ids, batch.suffix_block_table, own_seen
        arrays = [np.ascontiguousarray(array) for array in given]
        addresses = (array.ctypes.data for array in arrays)
        work = NativeWork(*addresses, self._state.data_ptr(), *map(len, arrays[:3]))
        work.kept = *arrays, self._state
        return work

    def _shared_items(
        self, batch: AttentionBatch, group: Ints, is_short: npt.NDArray[np.bool_], shared_lens: Ints
    ) -> Ints:
        """Items of the rows of consecutive short sequences of a group."""
        is_next_same = is_short[1:] & is_short[:-1] & (group[1:] == group[:-1])
        starts = is_short & ~np.concatenate([[False], is_next_same])
        ends = is_short & ~np.concatenate([is_next_same, [False]])
        first = batch.cu_seqlens_q[:-1][starts].astype(np.int64)
        run, offset, count = _cut(batch.cu_seqlens_q[1:][ends] - first, self._tile_tokens)
        run_group = group[starts][run]
        shared_len = shared_lens[run_group]
        shared = [first[run] + offset, count, batch.prefix_block_starts[run_group], shared_len]
        return _longest_first(shared, cost=count * shared_len)


def _longest_first(columns: Sequence[npt.NDArray[np.integer]], cost: Ints) -> Ints:
    """Items ``[n, columns]``, sorted by descending cost, contiguous."""
    return np.ascontiguousarray(np.stack(columns, axis=1, dtype=np.int64)[np.argsort(-cost, kind="stable")])


def _cut(lengths: Ints, most: int) -> tuple[Ints, Ints, Ints]:
    """Splits ranges into pieces of at most `most`. Of each piece: the index of its range, its offset, its length."""
    num_pieces = cdiv(lengths, most)
    index = np.repeat(np.arange(len(lengths)), num_pieces)
    offset = (np.arange(len(index)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)) * most
    return index, offset, np.minimum(lengths[index] - offset, most)
