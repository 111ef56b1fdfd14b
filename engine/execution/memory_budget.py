"""The KV memory that the setting "auto" stands for."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from engine.config import EngineConfig
from engine.device.free_memory import MOST_CPU_KV_BYTES, free_memory_bytes
from engine.execution.memory_profile import MemoryCounters, MemoryProfile, measure_memory
from engine.execution.step_graphs import find_buckets, graph_bytes
from engine.kernels.attention_backend import AttentionBackend
from engine.kv.kv_cache import KVShape
from engine.model.model import Model

if TYPE_CHECKING:  # Triton may not be installed
    from engine.kernels.triton.triton_attention import TritonAttention


def find_kv_budget(
    config: EngineConfig, model: Model, backend: AttentionBackend, graphable: "TritonAttention | None"
) -> int:
    """The budget of a loaded model and its attention backend; `graphable` is the backend where CUDA graphs will be
    made. See `choose_kv_budget`."""
    buckets = find_buckets(config.step_tokens)

    def measure() -> MemoryProfile:
        return measure_memory(
            model,
            backend,
            config,
            MemoryCounters(model.device),
            graph_share=0.0 if graphable is None else min(1.0, buckets[-1] / config.step_tokens),
            graph_bytes=0 if graphable is None else graph_bytes(graphable, buckets),
        )

    num_bytes = choose_kv_budget(config, model.device, measure)
    return num_bytes if model.device.type == "cpu" else min(num_bytes, most_kv_bytes(config.block_size, model.kv_shape))


def most_kv_bytes(block_size: int, shape: KVShape) -> int:
    """Bytes of the most KV blocks that the kernels of a GPU can number, one of them for padding. A tiny model reaches
    this limit before the device's memory."""
    from engine.kernels.triton.tile_jobs import MOST_BLOCKS  # imported only when needed

    return (MOST_BLOCKS - 1) * (block_size * shape.bytes_per_token // len(shape.layout.windows))


def choose_kv_budget(config: EngineConfig, device: torch.device, measure_left: Callable[[], MemoryProfile]) -> int:
    """Bytes of KV memory for "auto" once the weights are loaded, the same for each process that shares the device.

    Args:
        config: the memory fraction, and whether a second process shares the device.
        measure_left: measures a GPU's memory; not called for a CPU.
    Raises:
        CapacityError: nothing is left for KV.
    """
    num_processes = 2 if config.disaggregation == "processes" and resolve_prefill_device(device) == device else 1
    if device.type == "cpu":
        free_bytes = int(config.memory_fraction * free_memory_bytes(device))
        return min(free_bytes, MOST_CPU_KV_BYTES) // num_processes
    return measure_left().kv_share_bytes(config.memory_fraction, num_processes)


def resolve_prefill_device(device: torch.device) -> torch.device:
    """The device of a process that computes prompts for an engine on `device`: the next GPU where there are several."""
    if device.type == "cpu" or torch.cuda.device_count() < 2:
        return device
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.device(device.type, (index + 1) % torch.cuda.device_count())
