"""Decode steps as CUDA graphs: one launch from the host in place of nine for each layer.

A graph repeats the launches of its capture, with the same addresses and sizes. So there is a graph for each of a few
numbers of rows, the *buckets*, and a step uses the smallest bucket that holds it. All data that changes from step to
step is in fixed buffers: token ids, positions, the attention's work list, the last hidden states. Rows beyond the
step's are computed from token 0, without a slot for their KV and without attention, and their results are not read.

The first step of a bucket runs eagerly, which compiles kernels and sizes workspaces; the second one captures.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.device.transfers import to_device
from engine.kernels import cdiv
from engine.kernels.triton.device_work import DeviceWork, WorkCapacity
from engine.kernels.triton.tile_ranges import MOST_ROUNDS
from engine.kv.kv_cache import KVCache
from engine.model.attention_step import AttentionStep
from engine.model.model import Model
from engine.model.pending_tokens import fill_in
from engine.scheduling.token_batch import TokenBatch

if TYPE_CHECKING:  # Triton is not installed everywhere
    from engine.kernels.triton.triton_attention import TritonAttention

LOGGER = logging.getLogger("batchloom.engine")

BUCKETS = (
    *(1, 2, 4, 8, *range(16, 129, 16), *range(160, 257, 32), *range(320, 513, 64)),
    *(*range(640, 1025, 128), *range(1280, 2049, 256)),
)
"""Rows of the graphs. A larger step keeps the device busy for longer than its launches take."""

GRAPH_BYTES = 16 << 20
"""Memory that the driver keeps for a graph: about a thousand launches and their arguments."""


class DeviceGraph:
    """A graph of a CUDA or ROCm GPU.

    Args:
        stream: the one to capture on; torch's own belongs to the GPU of the process's first capture.
        other: a graph whose memory this one shares, because they never run at the same time; None: it has its own. A
            pool of memory ends with the last graph that has it, and torch refuses to capture with its handle then.
    """

    def __init__(self, stream: torch.cuda.Stream, other: "DeviceGraph | None") -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._stream = stream
        self._pool: Any = torch.cuda.graph_pool_handle() if other is None else other._pool

    def capture(self, compute: Callable[[], None]) -> None:
        """Records the launches of `compute` without computing them.

        Before 2.13, torch leaves a capture open that the driver has ended: its allocator then gives no memory back, and
        all later captures fail (pytorch #180395). So a capture that fails is closed here.
        """
        stream = torch.cuda.current_stream()
        try:
            # "thread_local": other threads may use the device during the capture.
            with torch.cuda.graph(self._graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                compute()
        except Exception:
            with suppress(Exception):  # the first call raises where torch has closed the capture
                torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)
                torch._C._cuda_releasePool(self._stream.device_index, self._pool)
            raise
        finally:
            torch.cuda.set_stream(stream)  # a failed capture leaves its own stream current

    def replay(self) -> None:
        """Launches the recorded work, in stream order."""
        self._graph.replay()


def find_buckets(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Rows of the graphs of an engine whose steps have at most max_num_batched_tokens."""
    return BUCKETS[: bisect_left(BUCKETS, max_num_batched_tokens) + 1]


def graph_bytes(backend: "TritonAttention", buckets: tuple[int, ...]) -> int:
    """Memory that graphs of all buckets keep, besides that of their steps; block tables are not counted."""
    num_graphs = len(buckets) * len(backend.tuned.launches)
    num_partials = work_capacity(backend, buckets[-1], most_blocks=0, num_kv_blocks=0).num_partials
    return num_graphs * GRAPH_BYTES + num_partials * backend.num_q_heads * (backend.head_dim + 1) * 4


@dataclass(slots=True, kw_only=True)
class _Bucket:
    """Steps of at most num_rows rows, with one launch configuration of the attention kernel. The graph is captured at
    the second run: None until then, and where the capture failed."""

    num_rows: int
    step: AttentionStep
    work: DeviceWork
    num_runs: int = 0
    graph: DeviceGraph | None = None


class StepGraphs:
    """Computes steps in which each sequence has one row; the caller computes all other steps.

    Args:
        backend: its launches depend only on the DeviceWork (`AttentionBackend.graphable`).
        buckets: see `find_buckets`.
        max_model_len: longest prompt plus answer, in tokens.
        make_graph: makes a new graph that shares the memory of another, or of none; by default a `DeviceGraph`.

    Attributes:
        capture_ms: the host's time for each capture, failed ones included.
        failures: why captures failed, in a line each.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        backend: "TritonAttention",
        *,
        buckets: tuple[int, ...],
        max_model_len: int,
        make_graph: Callable[[Any], DeviceGraph] | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._backend = backend
        self._most_blocks = cdiv(max_model_len, cache.block_size) + 1
        self._make_graph = make_graph or partial(DeviceGraph, torch.cuda.Stream(model.device))  # type: ignore
        self._sizes = buckets
        self._buckets: dict[tuple[int, str, bool], _Bucket] = {}
        self.capture_ms: list[float] = []
        self.failures: list[str] = []
        self._scratch = backend.make_scratch(self._capacity(buckets[-1]))
        self._numbers = torch.zeros(2 * buckets[-1], dtype=torch.int64, device=model.device)
        shape = (buckets[-1], model.hidden_size)
        self._hidden = torch.zeros(shape, dtype=model.dtype, device=model.device)

    @torch.inference_mode()
    def forward(self, batch: TokenBatch, pending_token_ids: torch.Tensor | None) -> torch.Tensor | None:
        """As `Model.forward`; None, without computing anything, where no bucket covers the step."""
        attention = batch.attention
        num_rows = attention.num_rows
        if num_rows != len(attention.suffix_lens) or num_rows > self._sizes[-1]:
            return None
        bucket_rows = next(size for size in self._sizes if size >= num_rows)
        work_list = self._backend.plan(attention)
        capacity = self._capacity(bucket_rows)
        if not capacity.holds(WorkCapacity.of(work_list)):
            return None
        key = (bucket_rows, work_list.launch.name, self._model.is_compiled)
        if key not in self._buckets:
            work = self._backend.reserve(capacity, work_list.launch, self._scratch)
            step = AttentionStep(backend=self._backend, cache=self._cache, works=(work,))
            self._buckets[key] = _Bucket(num_rows=bucket_rows, step=step, work=work)
        bucket = self._buckets[key]
        bucket.work.fill(work_list, attention.slot_mapping)
        self._fill_inputs(batch, bucket_rows, pending_token_ids)
        bucket.num_runs += 1
        if bucket.num_runs == 2:
            bucket.graph = self._capture(bucket)
        if bucket.graph is None:
            self._compute(bucket)
        else:
            bucket.graph.replay()
        return self._hidden.index_select(0, to_device(batch.output_rows, self._model.device))

    def forget(self) -> None:
        """Drops the graphs, after the model's weights were replaced; each is captured again."""
        for bucket in self._buckets.values():
            bucket.num_runs, bucket.graph = 0, None

    def _capture(self, bucket: _Bucket) -> DeviceGraph | None:
        """The bucket's graph; None where the capture fails, for lack of memory or of support by device or driver."""
        graph = self._make_graph(next((other.graph for other in self._buckets.values() if other.graph), None))
        started = time.perf_counter()
        try:
            graph.capture(lambda: self._compute(bucket))
        except Exception as error:  # Triton's errors have no common base class
            cause = error.__context__ or error  # ending a failed capture raises, too; the first error says more
            self.failures.append((str(cause).strip().splitlines() or [""])[0])
            if len(self.failures) == 1:
                LOGGER.warning("going on without a CUDA graph of %d rows: %s", bucket.num_rows, self.failures[0])
            return None
        finally:
            self.capture_ms.append((time.perf_counter() - started) * 1e3)
        return graph

    def _compute(self, bucket: _Bucket) -> None:
        """Computes the bucket's rows from fixed buffers into fixed buffers."""
        numbers, num_rows = self._numbers, bucket.num_rows
        hidden = self._model.compute(numbers[:num_rows], numbers[num_rows : 2 * num_rows], bucket.step)
        self._hidden[:num_rows].copy_(hidden)

    def _fill_inputs(self, batch: TokenBatch, bucket_rows: int, pending_token_ids: torch.Tensor | None) -> None:
        """Writes token ids and positions of the bucket's rows in one transfer; rows beyond the step's get 0."""
        numbers = np.zeros(2 * bucket_rows, dtype=np.int64)
        numbers[: len(batch.input_ids)] = batch.input_ids
        numbers[bucket_rows : bucket_rows + len(batch.positions)] = batch.positions
        source = torch.from_numpy(numbers)
        source = source.pin_memory() if self._numbers.is_cuda else source
        self._numbers[: 2 * bucket_rows].copy_(source, non_blocking=True)  # after the steps on the stream that read it
        if batch.has_pending_tokens:
            input_ids = self._numbers[:bucket_rows]
            input_ids.copy_(fill_in(input_ids, pending_token_ids, self._model.shard))

    def _capacity(self, num_rows: int) -> WorkCapacity:
        """Room for almost any step of num_rows rows; larger ones are computed without a graph."""
        # Where layers have windows, several table entries may be the same block.
        num_kv_blocks = num_rows * self._most_blocks if any(self._cache.layout.windows) else self._cache.num_blocks
        return work_capacity(self._backend, num_rows, most_blocks=self._most_blocks, num_kv_blocks=num_kv_blocks)


def work_capacity(backend: "TritonAttention", num_rows: int, *, most_blocks: int, num_kv_blocks: int) -> WorkCapacity:
    """The capacity for steps of num_rows sequences of one row each.

    Args:
        most_blocks: of one sequence, its prefix's included.
        num_kv_blocks: bounds the sequences' own blocks; prefixes and packs are assumed to have at most as many each.
    """
    # Each row has a tile for its own KV, packed or not, and at most one in a prefix tile; ranges are split into no more
    # tiles than fill the program slots a few times.
    tuned = backend.tuned
    slots = tuned.num_processors * max(launch.programs_per_processor for launch in tuned.launches)
    num_cuts = MOST_ROUNDS * slots // backend.num_kv_heads + 1
    rows_a_tile = max(shape.rows for launch in tuned.launches for shape in launch.shapes) // backend.group_size
    return WorkCapacity(
        num_rows=num_rows,
        num_tiles=2 * num_rows + num_cuts,
        num_row_ids=3 * num_rows,
        num_table_entries=3 * min(num_kv_blocks, num_rows * most_blocks),
        num_partials=2 * num_rows + num_cuts * min(num_rows, rows_a_tile),
    )
