"""The KV memory that "auto" stands for. On a GPU, a full step is run, and all other use of memory is measured."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.config import EngineConfig
from engine.device.free_memory import MOST_CPU_KV_BYTES, free_memory_bytes
from engine.errors import CapacityError
from engine.execution.draws import sample
from engine.execution.step_graphs import find_buckets, graph_bytes
from engine.kernels import cdiv
from engine.kernels.attention_backend import AttentionBackend
from engine.kernels.output_layer import ROWS_AT_ONCE
from engine.kv.kv_cache import KVCache, KVShape
from engine.kv.kv_layout import kept_windows
from engine.model.model import Model
from engine.request import Request
from engine.scheduling.sequence import Sequence
from engine.scheduling.token_batch import ChunkGroup, Chunks, TokenBatch, build_token_batch

if TYPE_CHECKING:  # Triton may not be installed
    from engine.kernels.triton.triton_attention import TritonAttention

_GB = 10**9


def find_kv_budget(
    config: EngineConfig, model: Model, backend: AttentionBackend, graphable: "TritonAttention | None"
) -> int:
    """Bytes of KV memory for "auto" once the weights are loaded, the same for each process that shares the device.

    Args:
        backend: of the model; a GPU's memory is measured with it.
        graphable: the backend where CUDA graphs will be made.
    Raises:
        CapacityError: nothing is left for KV.
    """
    device, fraction = model.device, config.memory_fraction
    num_processes = 2 if config.disaggregation == "processes" and resolve_prefill_device(device) == device else 1
    if device.type == "cpu":
        free_bytes = free_memory_bytes(device) - (num_processes - 1) * model.weight_bytes  # of a worker still to start
        return min(max(0, int(fraction * free_bytes)), MOST_CPU_KV_BYTES) // num_processes
    buckets = find_buckets(config.step_tokens)
    profile = measure_memory(
        model,
        backend,
        config,
        graph_share=0.0 if graphable is None else min(1.0, buckets[-1] / config.step_tokens),
        graph_bytes=0 if graphable is None else graph_bytes(graphable, buckets),
    )
    return min(profile.kv_share_bytes(fraction, num_processes), most_kv_bytes(config.block_size, model.kv_shape))


def most_kv_bytes(block_size: int, shape: KVShape) -> int:
    """Bytes of the most KV blocks that a GPU's kernels can number, one for padding; reached by tiny models only."""
    from engine.kernels.triton.tile_jobs import MOST_BLOCKS  # imported only when needed

    return (MOST_BLOCKS - 1) * (block_size * shape.bytes_per_token // len(shape.layout.windows))


def resolve_prefill_device(device: torch.device) -> torch.device:
    """The device of a process that computes prompts for an engine on `device`: the next GPU where there are several."""
    if device.type == "cpu" or torch.cuda.device_count() < 2:
        return device
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.device(device.type, (index + 1) % torch.cuda.device_count())


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """A device's memory, and its use besides KV, in bytes.

    Attributes:
        elsewhere: used by other processes, and by the driver for this one.
        resident: weights, and everything else that is kept between steps.
        step: the most that a full step takes while it is computed and sampled.
        graphs: set aside for CUDA graphs.
    """

    total: int
    elsewhere: int
    resident: int
    step: int
    graphs: int

    def kv_share_bytes(self, memory_fraction: float, num_processes: int = 1) -> int:
        """Each process's KV memory: its part of memory_fraction of what is left; `CapacityError` if nothing is."""
        left = self.total - self.elsewhere - num_processes * (self.resident + self.step + self.graphs)
        if left <= 0:
            parts = (
                ("weights", num_processes * self.resident),
                ("a full step", num_processes * self.step),
                ("CUDA graphs", num_processes * self.graphs),
                ("other use of the device", self.elsewhere),
            )
            spent = ", ".join(f"{name} {size / _GB:.2f}" for name, size in parts)
            raise CapacityError(
                f"no memory is left for KV: of {self.total / _GB:.2f} GB, {spent} GB; a smaller "
                "max_num_batched_tokens makes a step smaller, cuda_graphs 'never' takes none for graphs"
            )
        return int(memory_fraction * left) // num_processes


def measure_memory(
    model: Model, backend: AttentionBackend, config: EngineConfig, *, graph_share: float, graph_bytes: int
) -> MemoryProfile:
    """Runs one full step, with KV memory for this step only, which is freed afterwards.

    Args:
        graph_share: the share of a full step's memory that CUDA graphs keep for themselves.
        graph_bytes: the memory that they need beyond this.
    """
    device = model.device
    _start_peak(device)
    resident_bytes = torch.cuda.memory_reserved(device)
    kv_bytes = _run_full_step(model, backend, config)
    torch.cuda.synchronize(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    elsewhere_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved(device)
    step_bytes = max(0, torch.cuda.max_memory_reserved(device) - resident_bytes - kv_bytes)
    _start_peak(device)
    return MemoryProfile(
        total=total_bytes,
        elsewhere=elsewhere_bytes,
        resident=resident_bytes,
        step=step_bytes,
        graphs=int(graph_share * step_bytes) + graph_bytes,
    )


def _start_peak(device: torch.device) -> None:
    """Frees cached memory that is not in use, and starts a new peak."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)


def _run_full_step(model: Model, backend: AttentionBackend, config: EngineConfig) -> int:
    """Computes and samples a step of the most rows and the most output rows at once; returns the bytes of its KV."""
    batch = _full_batch(config, model.max_positions)
    num_blocks = len(batch.attention.suffix_block_table)
    shape = replace(model.kv_shape, windows=())
    cache = KVCache(
        shape,
        block_size=config.block_size,
        budget_bytes=num_blocks * config.block_size * shape.bytes_per_token,
        device=model.device,
    )
    # Attention to shared prefixes needs scratch memory, which these rows, sharing nothing, do not take. Each block
    # table of a step has its own.
    kept = replace(shape, windows=kept_windows(model.kv_shape.windows, config))
    num_scratch_bytes = len(kept.layout.windows) * backend.scratch_bytes(config.step_tokens)
    scratch = torch.empty(num_scratch_bytes, dtype=torch.uint8, device=model.device)
    hidden = model.forward(batch, cache, backend)
    del scratch
    request = Request(request_id="profile", token_ids=np.zeros(1, dtype=np.int32), temperature=1.0)
    drawn = [(Sequence(request=request, owners=(0,), node=None), 1)] * len(hidden)
    masks = torch.full((len(hidden), cdiv(model.vocab_size, 32)), -1, dtype=torch.int32, device=model.device)
    sample(hidden, model, drawn, masks)  # as for grammars; without masks drawing needs less
    model.logits(hidden).log_softmax(dim=-1)  # as label scoring does; greedy sampling needs less
    return num_blocks * cache.block_bytes


def _full_batch(config: EngineConfig, max_positions: int) -> TokenBatch:
    """Prompts of a few blocks that share nothing."""
    length = min(4 * config.block_size, max_positions)
    lengths = [min(length, config.step_tokens - first) for first in range(0, config.step_tokens, length)]
    num_blocks = cdiv(length, config.block_size)
    chunks = Chunks()
    for index, num_tokens in enumerate(lengths):
        block_table = np.arange(index * num_blocks, (index + 1) * num_blocks, dtype=np.int32)
        num_output_rows = min(num_tokens, max(0, ROWS_AT_ONCE - index * length))
        chunks.add(np.zeros(num_tokens, dtype=np.int32), 0, 0, block_table, num_output_rows)
    return build_token_batch(chunks, [ChunkGroup(np.empty(0, dtype=np.int32), 0, len(lengths))], config.block_size)
