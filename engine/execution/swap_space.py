"""The host memory that a run swaps KV to."""

import torch

from engine.config import EngineConfig
from engine.device.free_memory import free_memory_bytes
from engine.kv.kv_cache import KVCache
from engine.scheduling.policies.preemption import SwapSpace


def make_swap_space(config: EngineConfig, cache: KVCache, device: torch.device) -> SwapSpace:
    """A run's swap space; "auto" is the size of the KV memory, at most half of the free memory. See `SwapSpace`."""
    if config.swap_memory_bytes == "auto":
        num_bytes = min(cache.num_blocks * cache.block_bytes, free_memory_bytes(torch.device("cpu")) // 2)
    else:
        num_bytes = config.swap_memory_bytes
    # Pinned memory is allocated in powers of two, up to twice the size that is asked for.
    num_blocks = (num_bytes if device.type == "cpu" else num_bytes // 2) // cache.block_bytes
    return SwapSpace(cache, num_blocks)
