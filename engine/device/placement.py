"""Where an engine computes, and how much memory it takes for KV."""

from collections.abc import Callable

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.execution.memory_profile import MemoryProfile
from engine.kv.kv_cache import KVCache, free_memory_bytes

MOST_CPU_KV_BYTES = 4 * 1024**3
"""On a host, a KV budget of "auto" takes no more than this: other programs live there too."""


def find_device(name: str) -> torch.device:
    """The device of a setting; "auto" is the first GPU, else the CPU.

    Raises:
        ConfigError: no device has this name.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is not known to torch") from error


def find_prefill_device(device: torch.device) -> torch.device:
    """Where a process that computes prompts for one on `device` runs: on the next GPU where there are several."""
    if device.type == "cpu" or torch.cuda.device_count() < 2:
        return device
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.device(device.type, (index + 1) % torch.cuda.device_count())


def kv_budget_bytes(config: EngineConfig, device: torch.device, measure_left: Callable[[], MemoryProfile]) -> int:
    """KV memory on a device whose weights are loaded; a process that shares the device gets as much.

    Args:
        measure_left: asked on a GPU, for a budget of "auto".
    Raises:
        CapacityError: nothing is left for KV.
    """
    if config.kv_memory_bytes != "auto":
        return config.kv_memory_bytes
    num_processes = 2 if config.disaggregation == "processes" and find_prefill_device(device) == device else 1
    if device.type == "cpu":
        free_bytes = int(config.memory_fraction * free_memory_bytes(device))
        return min(free_bytes, MOST_CPU_KV_BYTES) // num_processes
    return measure_left().kv_budget_bytes(config.memory_fraction, num_processes)


def use_device(device: torch.device) -> None:
    """Makes a GPU the one that this thread's kernels, graphs and events go to."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def swap_budget_bytes(config: EngineConfig, cache: KVCache, device: torch.device) -> int:
    """KV of preempted requests that host memory is to hold."""
    if config.preemption != "swap":
        return 0
    if config.swap_memory_bytes == "auto":
        budget_bytes = min(cache.num_blocks * cache.block_bytes, free_memory_bytes(torch.device("cpu")) // 2)
    else:
        budget_bytes = config.swap_memory_bytes
    # Pinned memory, which a GPU copies to, comes in powers of two: up to twice what it holds.
    return budget_bytes if device.type == "cpu" else budget_bytes // 2
