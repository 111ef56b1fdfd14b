"""The contents of KV blocks: copies in host memory, and blocks that must not be read again."""

import numpy as np
import numpy.typing as npt
import torch

from engine.device.transfers import to_device
from engine.kv.kv_cache import KVCache


def read_blocks(cache: KVCache, block_ids: npt.NDArray[np.int32]) -> torch.Tensor:
    """A copy of blocks in host memory: ``[tensors, n, block_size, num_kv_heads, head_size]``."""
    first = cache.tensors[0]
    index, is_on_gpu = to_device(block_ids.astype(np.int64), first.device), first.device.type == "cuda"
    shape = (len(cache.tensors), len(block_ids), *first.shape[1:])
    kv = torch.empty(shape, dtype=first.dtype, pin_memory=is_on_gpu)
    for copied, tensor in zip(kv, cache.tensors, strict=True):
        copied.copy_(tensor.index_select(0, index), non_blocking=True)
    if is_on_gpu:
        torch.cuda.current_stream(first.device).synchronize()
    return kv


def write_blocks(cache: KVCache, block_ids: npt.NDArray[np.int32], kv: torch.Tensor) -> None:
    """Writes into n blocks.

    Args:
        cache, block_ids: the memory, and int32 ``[n]``, blocks of it.
        kv: from `read_blocks` of this memory or of another one with its layout.
    """
    index, is_pinned = to_device(block_ids.astype(np.int64), cache.tensors[0].device), kv.is_pinned()
    for tensor, saved in zip(cache.tensors, kv, strict=True):
        tensor.index_copy_(0, index, saved.to(tensor.device, non_blocking=is_pinned))


def clear_broken_blocks(cache: KVCache, num_blocks: int) -> None:
    """Zeroes those of the first `num_blocks`, and of padding, that have NaN or infinity: later rows would read them
    under a weight of 0, and 0 * NaN is NaN."""
    for tensor in cache.tensors:
        for blocks in (tensor[:num_blocks], tensor[cache.num_blocks :]):
            if tensor.is_floating_point():
                blocks[~blocks.flatten(1).sum(1, dtype=torch.float32).isfinite()] = 0
