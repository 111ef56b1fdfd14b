"""The paged KV memory of one model on one device, and the number of blocks in a budget."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.device.transfers import to_device
from engine.errors import CapacityError, OutOfMemoryError
from engine.kv.kv_layout import KVLayout, find_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """The KV of a token: layers, KV heads, head dim, dtype. An 8-bit dtype has a scale of 2 bytes for each head.
    `windows` has the number of positions that a row of each layer sees, 0 for all; empty where no KV is freed early."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    windows: tuple[int, ...] = ()

    @property
    def layout(self) -> KVLayout:
        """Which layers share a block table: all, where no KV is freed early."""
        if self.windows:
            return find_layout(self.windows)
        n = self.num_layers
        return KVLayout(windows=(0,), tables=(0,) * n, slots=tuple(range(n)), num_slots=n)

    @property
    def head_size(self) -> int:
        """Elements of a token in one head's keys or values, its scale included."""
        return self.head_dim + (2 if self.dtype.itemsize == 1 else 0)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers."""
        layout = self.layout
        return 2 * len(layout.windows) * layout.num_slots * self.num_kv_heads * self.head_size * self.dtype.itemsize


class KVCache:
    """Keys and values, one pair of tensors a layer: ``[num_blocks, block_size, num_kv_heads, head_size]``.
    Layers of different block tables (`layout`) share tensors; `tensors` has each once: keys, then values."""

    def __init__(
        self, shape: KVShape, *, block_size: int, budget_bytes: int, device: torch.device, has_pad_block: bool = False
    ) -> None:
        """Allocates as many blocks as `budget_bytes` hold, and with `has_pad_block` an additional one, of index
        num_blocks, for the KV of padding. Raises `CapacityError` if the budget does not hold a single block,
        `OutOfMemoryError` if the device has less free memory than the budget."""
        self.block_size = block_size
        self.layout = layout = shape.layout
        self.block_bytes = block_size * shape.bytes_per_token // len(layout.windows)
        self.num_blocks = budget_bytes // self.block_bytes
        if self.num_blocks < 1:
            raise CapacityError(
                f"a KV budget of {budget_bytes} bytes holds no block of {block_size} tokens: {self.block_bytes} bytes"
            )
        sizes = (self.num_blocks + has_pad_block, block_size, shape.num_kv_heads, shape.head_size)
        # fp8 is stored as uint8: copies of blocks use operations that torch lacks for fp8.
        stored = torch.uint8 if shape.dtype.itemsize == 1 and shape.dtype.is_floating_point else shape.dtype
        try:
            self.tensors = [_zeros(sizes, stored, device) for _ in range(2 * layout.num_slots)]
        except (MemoryError, torch.OutOfMemoryError) as error:
            reason = f"a KV budget of {budget_bytes:,} bytes does not fit into the memory of device {str(device)!r}"
            raise OutOfMemoryError(f"{reason}: {error}") from error
        self.keys = [self.tensors[slot].view(shape.dtype) for slot in layout.slots]
        self.values = [self.tensors[layout.num_slots + slot].view(shape.dtype) for slot in layout.slots]

    def read_blocks(self, block_ids: npt.NDArray[np.int32]) -> torch.Tensor:
        """A copy of blocks in host memory: ``[tensors, n, block_size, num_kv_heads, head_size]``."""
        first = self.tensors[0]
        index, is_on_gpu = to_device(block_ids.astype(np.int64), first.device), first.device.type == "cuda"
        kv = first.new_empty((len(self.tensors), len(block_ids), *first.shape[1:]), device="cpu", pin_memory=is_on_gpu)
        for copied, tensor in zip(kv, self.tensors, strict=True):
            copied.copy_(tensor.index_select(0, index), non_blocking=True)
        if is_on_gpu:
            torch.cuda.current_stream(first.device).synchronize()
        return kv

    def write_blocks(self, block_ids: npt.NDArray[np.int32], kv: torch.Tensor) -> None:
        """Writes a copy from `read_blocks` into n blocks, of this memory or of another one with its layout."""
        index, is_pinned = to_device(block_ids.astype(np.int64), self.tensors[0].device), kv.is_pinned()
        for tensor, saved in zip(self.tensors, kv, strict=True):
            tensor.index_copy_(0, index, saved.to(tensor.device, non_blocking=is_pinned))


def _zeros(layout: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros: blocks that were never written may be read under a weight of 0, and 0 * NaN is NaN."""
    if device.type != "cpu":
        return torch.zeros(layout, dtype=dtype, device=device)
    num_bytes = math.prod(layout) * dtype.itemsize
    # numpy takes pages when they are first written; torch.zeros would write them all now.
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(layout)
