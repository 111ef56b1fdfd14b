"""How much of a GPU's memory is left for KV: a full step is run, and all other use of memory is measured."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.config import EngineConfig
from engine.errors import CapacityError
from engine.execution.draws import DrawnRow, sample
from engine.kernels import cdiv
from engine.kernels.attention_backend import AttentionBackend
from engine.kernels.output_layer import ROWS_AT_ONCE
from engine.kv.kv_cache import KVCache
from engine.model.model import Model
from engine.request import Request
from engine.scheduling.chunks import ChunkGroup, Chunks
from engine.scheduling.token_batch import TokenBatch, build_token_batch

_GB = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """The values of a device's memory counters: its bytes and the free ones, as its driver reports them, those held by
    this process's tensors and torch's cache for them, and the most that these have held since the peak was reset."""

    total_bytes: int
    free_bytes: int
    reserved_bytes: int
    peak_bytes: int


class MemoryCounters:
    """The memory counters of a CUDA or ROCm GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset_peak(self) -> None:
        """Frees cached memory that is not in use, and starts a new peak."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def read(self) -> MemoryReading:
        """The counters after all launched work is done."""
        torch.cuda.synchronize(self._device)
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return MemoryReading(
            total_bytes=total_bytes,
            free_bytes=free_bytes,
            reserved_bytes=torch.cuda.memory_reserved(self._device),
            peak_bytes=torch.cuda.max_memory_reserved(self._device),
        )


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
        """The KV memory of each process: its part of memory_fraction of what is left, where all processes need as much.
        Raises `CapacityError` if nothing is left."""
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
                "max_num_batched_tokens makes a step smaller"
            )
        return int(memory_fraction * left) // num_processes


def measure_memory(
    model: Model,
    backend: AttentionBackend,
    config: EngineConfig,
    counters: MemoryCounters,
    *,
    graph_share: float,
    graph_bytes: int,
) -> MemoryProfile:
    """Runs one full step, with KV memory for this step only, which is freed afterwards.

    Args:
        graph_share: the share of a full step's memory that CUDA graphs keep for themselves.
        graph_bytes: the memory that they need beyond this.
    """
    counters.reset_peak()
    before = counters.read()
    kv_bytes = _run_full_step(model, backend, config)
    after = counters.read()
    step_bytes = max(0, after.peak_bytes - before.reserved_bytes - kv_bytes)
    counters.reset_peak()
    return MemoryProfile(
        total=before.total_bytes,
        elsewhere=before.total_bytes - after.free_bytes - after.reserved_bytes,
        resident=before.reserved_bytes,
        step=step_bytes,
        graphs=int(graph_share * step_bytes) + graph_bytes,
    )


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
    # Attention to shared prefixes needs scratch memory, which these rows, sharing nothing, do not take.
    num_scratch_bytes = backend.scratch_bytes(config.step_tokens)
    scratch = torch.empty(num_scratch_bytes, dtype=torch.uint8, device=model.device)
    hidden = model.forward(batch, cache, backend)
    del scratch
    request = Request(request_id="profile", token_ids=np.zeros(1, dtype=np.int32), temperature=1.0)
    drawn = [DrawnRow(row, request, 0) for row in range(len(hidden))]
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
