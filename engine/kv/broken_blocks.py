"""Blocks of a failed run that later rows must not read."""

import torch

from engine.kv.kv_cache import KVCache


def clear_broken_blocks(cache: KVCache, num_blocks: int) -> None:
    """Zeroes those of the first `num_blocks`, and of padding, that have NaN or infinity: later rows would read them
    under a weight of 0, and 0 * NaN is NaN."""
    for tensor in cache.tensors:
        for blocks in (tensor[:num_blocks], tensor[cache.num_blocks :]):
            if tensor.is_floating_point():
                blocks[~blocks.flatten(1).sum(1, dtype=torch.float32).isfinite()] = 0
