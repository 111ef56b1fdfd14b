"""One step's work list on the device: made once by `prepare`, read by every layer's launch."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels import cdiv
from engine.kernels.triton.tuned import Launch
from engine.kernels.triton.work_list import RowField, TileField, WorkList

_ALIGNMENT = 16
"""Of sections, in int32 elements: Triton recompiles a kernel when the alignment of a pointer or an offset changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkCapacity:
    """The largest work list that fits a DeviceWork. A launch in a CUDA graph has fixed sizes and addresses."""

    num_rows: int
    num_tiles: int
    num_row_ids: int
    num_table_entries: int
    num_partials: int

    @classmethod
    def of(cls, work_list: WorkList) -> "WorkCapacity":
        """The capacity that a work list needs."""
        return cls(
            num_rows=len(work_list.rows),
            num_tiles=len(work_list.tiles),
            num_row_ids=len(work_list.row_ids),
            num_table_entries=len(work_list.block_table),
            num_partials=work_list.num_partials,
        )

    def holds(self, other: "WorkCapacity") -> bool:
        """Whether no size of the other capacity is larger."""
        return all(getattr(self, name) >= getattr(other, name) for name in WorkCapacity.__slots__)


class AttentionScratch:
    """Partial results and counters of a launch; successive launches on one stream may share them.

    Attributes:
        partial_out: fp32 ``[num_partials, num_q_heads, head_dim]``.
        partial_lse: fp32 ``[num_partials, num_q_heads]``, base 2.
        counters: int32 ``[num_rows, num_q_heads]``, the number of finished parts; all 0 between launches.
    """

    def __init__(self, capacity: WorkCapacity, *, num_q_heads: int, head_dim: int, device: torch.device) -> None:
        partials = (capacity.num_partials, num_q_heads)
        self.partial_out = torch.empty((*partials, head_dim), dtype=torch.float32, device=device)
        self.partial_lse = torch.empty(partials, dtype=torch.float32, device=device)
        num_counters = capacity.num_rows if capacity.num_partials else 0
        self.counters = torch.zeros((num_counters, num_q_heads), dtype=torch.int32, device=device)


class DeviceWork:
    """The tensors of one step, at fixed addresses.

    Attributes:
        num_tiles: the grid's extent; programs beyond the current work list's tiles exit at once.
        num_prefix_tiles: of the current work list.
        work: int32, in sections: tiles, row ids, rows, slots, and the block table last, since most of it is unused.
        row_ids_at, rows_at, block_table_at: starts of sections in `work`.
        slots: int64 ``[num_rows]``, where each row's key and value are written; -1: not written.
        partial_out, partial_lse, counters: of its scratch.
        copy_kv: makes copies of a layer's keys and values, which the tiles read; None: they read the caches.
    """

    def __init__(
        self, capacity: WorkCapacity, launch: Launch, scratch: AttentionScratch, *, device: torch.device
    ) -> None:
        sizes = (
            capacity.num_tiles * TileField.WIDTH,
            capacity.num_row_ids,
            capacity.num_rows * RowField.WIDTH,
            capacity.num_rows * 2,
            capacity.num_table_entries,
        )
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + cdiv(size, _ALIGNMENT) * _ALIGNMENT)
        self.launch = launch
        self.capacity = capacity
        self.num_tiles = capacity.num_tiles
        self.num_prefix_tiles = 0
        self.work = torch.empty(starts[-1], dtype=torch.int32, device=device)
        self.row_ids_at, self.rows_at, slots_at, self.block_table_at = starts[1:5]
        self._slots_part = slice(slots_at, slots_at + sizes[3])
        self.slots = self.work[self._slots_part].view(torch.int64)
        self.partial_out, self.partial_lse = scratch.partial_out, scratch.partial_lse
        self.counters = scratch.counters
        self.copy_kv: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None

    @property
    def row_parts(self) -> torch.Tensor:
        """int32 ``[num_rows]``, the number of parts of each row's attention; 0 for rows beyond the work list's."""
        return self.work[self.rows_at + RowField.NUM_PARTS :: RowField.WIDTH]

    def fill(self, work_list: WorkList, slot_mapping: npt.NDArray[np.int64]) -> None:
        """Copies a step's work list to the device in one transfer, for which later launches on the stream wait.

        Only the used part of the block table is copied. Rows beyond the work list's have no slot and no tile, so that
        nothing is computed or written for them. Raises `ValueError` if the work list does not fit, or is made for
        another launch.
        """
        if not self.capacity.holds(needed := WorkCapacity.of(work_list)):
            raise ValueError(f"work list needs {needed}, there is room for {self.capacity}")
        if work_list.launch != self.launch:
            raise ValueError(f"work list is made for launch {work_list.launch.name!r}, not {self.launch.name!r}")
        # torch's cache reuses a pinned buffer only after its transfer has finished.
        used = self.block_table_at + len(work_list.block_table)
        staged = torch.zeros(used, dtype=torch.int32, pin_memory=self.work.is_cuda)
        host = staged.numpy()
        starts = (0, self.row_ids_at, self.rows_at, self.block_table_at)
        sections = (work_list.tiles, work_list.row_ids, work_list.rows, work_list.block_table)
        for start, section in zip(starts, sections, strict=True):
            host[start : start + section.size] = section.reshape(-1)
        slots = host[self._slots_part].view(np.int64)
        slots[:] = -1
        slots[: len(slot_mapping)] = slot_mapping
        self.work[:used].copy_(staged, non_blocking=True)
        self.num_prefix_tiles = work_list.num_prefix_tiles
