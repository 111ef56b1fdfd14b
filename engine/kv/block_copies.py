"""Copies of KV blocks to host memory and back: for swapping, for another process, for the disk."""

import numpy as np
import numpy.typing as npt
import torch

from engine.device.transfers import to_device
from engine.kv.kv_cache import KVCache


class BlockCopies:
    """Reads and writes whole blocks of a KV memory."""

    def __init__(self, cache: KVCache) -> None:
        self._tensors = cache.tensors

    def read_blocks(self, block_ids: npt.NDArray[np.int32]) -> torch.Tensor:
        """A copy in host memory: ``[tensors, n, block_size, num_kv_heads, head_size]``, keys, then values."""
        first = self._tensors[0]
        index, is_on_gpu = to_device(block_ids.astype(np.int64), first.device), first.device.type == "cuda"
        shape = (len(self._tensors), len(block_ids), *first.shape[1:])
        kv = torch.empty(shape, dtype=first.dtype, pin_memory=is_on_gpu)
        for copied, tensor in zip(kv, self._tensors, strict=True):
            copied.copy_(tensor.index_select(0, index), non_blocking=True)
        if is_on_gpu:
            torch.cuda.current_stream(first.device).synchronize()
        return kv

    def write_blocks(self, block_ids: npt.NDArray[np.int32], kv: torch.Tensor) -> None:
        """Writes a copy from `read_blocks` into n blocks, of this memory or of another one with its layout."""
        index, is_pinned = to_device(block_ids.astype(np.int64), self._tensors[0].device), kv.is_pinned()
        for tensor, saved in zip(self._tensors, kv, strict=True):
            tensor.index_copy_(0, index, saved.to(tensor.device, non_blocking=is_pinned))
