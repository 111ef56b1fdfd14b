"""The paged KV memory of one model on one device, and how much of it a budget buys."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.device.transfers import to_device
from engine.errors import CapacityError


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """What a model keeps per token: layers, KV heads, head dim, dtype; in int8 a scale of 2 bytes with each head."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def head_size(self) -> int:
        """Elements that a token takes in a head's cache."""
        return self.head_dim + (2 if self.dtype == torch.int8 else 0)

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * self.dtype.itemsize


class KVCache:
    """Keys and values, one pair of tensors a layer: ``[num_blocks, block_size, num_kv_heads, head_size]``."""

    __slots__ = ("block_bytes", "block_size", "keys", "num_blocks", "values")

    def __init__(
        self, shape: KVShape, *, block_size: int, budget_bytes: int, device: torch.device, has_pad_block: bool = False
    ) -> None:
        """Allocates as many blocks as the budget holds.

        Args:
            has_pad_block: whether there is one block more, of index num_blocks, for KV that nobody reads.
        Raises:
            CapacityError: the budget does not hold a single block.
        """
        self.block_size = block_size
        self.block_bytes = block_size * shape.bytes_per_token
        self.num_blocks = budget_bytes // self.block_bytes
        if self.num_blocks < 1:
            raise CapacityError(
                f"a KV budget of {budget_bytes} bytes holds no block of {block_size} x {shape.bytes_per_token} bytes"
            )
        layout = (self.num_blocks + has_pad_block, block_size, shape.num_kv_heads, shape.head_size)
        self.keys = [_zeros(layout, shape.dtype, device) for _ in range(shape.num_layers)]
        self.values = [_zeros(layout, shape.dtype, device) for _ in range(shape.num_layers)]

    def read_blocks(self, block_ids: npt.NDArray[np.int32]) -> torch.Tensor:
        """A copy in host memory: ``[2 * num_layers, n, block_size, num_kv_heads, head_size]``, keys, then values."""
        index, device = self._index(block_ids), self.keys[0].device
        shape = (2 * len(self.keys), len(block_ids), *self.keys[0].shape[1:])
        kv = torch.empty(shape, dtype=self.keys[0].dtype, pin_memory=device.type == "cuda")
        for copied, tensor in zip(kv, (*self.keys, *self.values), strict=True):
            copied.copy_(tensor.index_select(0, index), non_blocking=True)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return kv

    def write_blocks(self, block_ids: npt.NDArray[np.int32], kv: torch.Tensor) -> None:
        """Writes what `read_blocks` gave into n blocks, of this memory or of another one like it."""
        index, is_pinned = self._index(block_ids), kv.is_pinned()
        for tensor, saved in zip((*self.keys, *self.values), kv, strict=True):
            tensor.index_copy_(0, index, saved.to(tensor.device, non_blocking=is_pinned))

    def _index(self, block_ids: npt.NDArray[np.int32]) -> torch.Tensor:
        return to_device(block_ids.astype(np.int64), self.keys[0].device)


def _zeros(layout: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros: a block that was never written may be read under a mask, and 0 * NaN is NaN."""
    if device.type != "cpu":
        return torch.zeros(layout, dtype=dtype, device=device)
    num_bytes = math.prod(layout) * dtype.itemsize
    # numpy maps pages when they are first touched, torch would fill them now.
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(layout)
