"""The Triton attention backends: shapes, a step's work, the checks."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar, Self

import torch

from engine.kernels.attention_backend import AttentionBackend
from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.decoder_layer import DecoderLayers, LayerWeights
from engine.kernels.scoring import Scoring
from engine.kernels.triton.cost_model import SharePolicy
from engine.kernels.triton.device_work import AttentionScratch, DeviceWork, WorkCapacity
from engine.kernels.triton.draw_kernel import draw_tokens
from engine.kernels.triton.fused import Caches, launch_attention
from engine.kernels.triton.layers.fp8 import head_dim_of, is_interpreted
from engine.kernels.triton.layers.gpu_layers import Fp8Layer, GpuLayer, GpuLayers, weights_on
from engine.kernels.triton.layers.kv_copy import TOKENS_A_ROW, KvCopy
from engine.kernels.triton.layers.layer_kernels import check_tensor
from engine.kernels.triton.shape import check_shape
from engine.kernels.triton.tile_jobs import MOST_BLOCKS
from engine.kernels.triton.tuned import Launch, load_tuned
from engine.kernels.triton.work_list import WorkList, build_work_list

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class TritonAttention(AttentionBackend):
    """Attention of one model on one device: one launch per layer; the cost model decides per group which sequences
    share their prefix. It does not change after construction: a step's state is in its DeviceWork.

    Args:
        dtype: of queries and, unless `fp8` is given, of the KV cache.
        fp8: the 8-bit format of products and of the KV cache (fp8.py); None: both are in dtype.
        device: a CUDA or ROCm GPU, or the CPU if Triton interprets kernels (TRITON_INTERPRET=1).
        architecture: name of the tuned configuration; "auto": the device's.
    Raises:
        ValueError: the kernels do not support the shape, dtype or device.
    """

    name: ClassVar[SharePolicy] = "fused"

    def __init__(
        self,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        block_size: int,
        device: torch.device,
        architecture: str = "auto",
        fp8: torch.dtype | None = None,
    ) -> None:
        check_shape(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size)
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {DTYPES}, got {dtype}")
        if device.type != "cuda" and not is_interpreted():
            raise ValueError(
                f"device {device} has no Triton; a GPU, or TRITON_INTERPRET=1 in the environment, is needed"
            )
        self.num_q_heads, self.num_kv_heads, self.head_dim = num_q_heads, num_kv_heads, head_dim
        self.group_size = num_q_heads // num_kv_heads
        self.dtype, self.block_size, self.device = dtype, block_size, device
        self.fp8 = fp8
        architecture = architecture_of(device) if architecture == "auto" else architecture
        self.tuned = load_tuned(architecture, element_bits=dtype.itemsize * 8, head_dim=head_dim)
        self._launches_for_copies = self.tuned.launches
        if fp8 is not None:
            self.tuned = self.tuned.for_8_bit_kv()
        if device.type == "cuda":
            num_processors = torch.cuda.get_device_properties(device).multi_processor_count
            self.tuned = replace(self.tuned, num_processors=num_processors)

    def plan(self, batch: AttentionBatch, launches: Sequence[Launch] = ()) -> WorkList:
        """Splits a step into tiles, for the fastest of the launches (default: all tuned ones)."""
        if batch.block_size != self.block_size:
            raise ValueError(f"batch has block_size {batch.block_size}, this backend {self.block_size}")
        tuned, heads = self.tuned, {"group_size": self.group_size, "num_kv_heads": self.num_kv_heads}
        tuned = replace(tuned, launches=tuple(launches)) if launches else tuned
        return build_work_list(batch, tuned, **heads, policy=self.name)

    def reserve(self, capacity: WorkCapacity, launch: Launch, scratch: AttentionScratch | None = None) -> DeviceWork:
        """Allocates work for steps of at most this size, at fixed addresses, as CUDA graphs need. Fill it before use.

        Args:
            scratch: of at least this capacity, may be shared by works that never run at the same time; None: a new one.
        """
        return DeviceWork(capacity, launch, scratch or self.make_scratch(capacity), device=self.device)

    @property
    def graphable(self) -> Self | None:
        """See `AttentionBackend.graphable`: steps in one DeviceWork have the same launches."""
        return self

    def scratch_bytes(self, num_rows: int) -> int:
        """For a step in which every row has two partial results, of prefix and own KV; and a copy of fp8 KV."""
        partial = 2 * num_rows * self.num_q_heads * (self.head_dim + 1) * torch.float32.itemsize
        if self.fp8 is None:
            return partial
        return partial + 2 * TOKENS_A_ROW * num_rows * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def make_layers(self, weights: Iterable[LayerWeights]) -> DecoderLayers:
        """Layers with few launches."""
        if self.fp8 is not None:
            return GpuLayers(Fp8Layer(self, weights_on(self.device, layer), self.fp8) for layer in weights)
        return GpuLayers(GpuLayer(self, layer) for layer in weights)

    draw_tokens = staticmethod(draw_tokens)

    def make_scratch(self, capacity: WorkCapacity) -> AttentionScratch:
        return AttentionScratch(capacity, num_q_heads=self.num_q_heads, head_dim=self.head_dim, device=self.device)

    def prepare(self, batch: AttentionBatch) -> DeviceWork:
        """Plans a step and copies it to the device in one transfer; ids of blocks whose KV is copied are another.
        Called once per step, for all layers."""
        num_tokens = self.block_size * (len(batch.prefix_block_ids) + len(batch.suffix_block_table))
        if self.fp8 is None or num_tokens > TOKENS_A_ROW * batch.num_rows:
            work_list, copy_kv = self.plan(batch), None
        else:
            work_list = self.plan(batch, self._launches_for_copies)
            block_shape = (self.block_size, self.num_kv_heads, self.head_dim)
            copy = KvCopy(work_list.block_table, block_shape, self.dtype, self.device)
            work_list, copy_kv = replace(work_list, block_table=copy.block_table), copy.of
        work = self.reserve(WorkCapacity.of(work_list), work_list.launch)
        work.fill(work_list, batch.slot_mapping)
        work.copy_kv = copy_kv
        return work

    def attend(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        work: DeviceWork,
        scoring: Scoring,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`.

        Args:
            query: any row and head strides.
            out: like query, the tensor to write to; rows beyond the work list's are not written. None: a new tensor.
        Raises:
            ValueError: the launch does not support the shapes, dtypes or strides.
        """
        if out is None:
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        shape = (len(query), self.num_q_heads, self.head_dim)
        if len(query) > work.capacity.num_rows:
            raise ValueError(f"query has {len(query)} rows, the step {work.capacity.num_rows}")
        if k_cache.shape[0] > MOST_BLOCKS:
            raise ValueError(f"{k_cache.shape[0]} KV blocks are more than {MOST_BLOCKS}")
        head_size = self.head_dim + k_cache.shape[3] - head_dim_of(k_cache)
        cache_shape = (k_cache.shape[0], self.block_size, self.num_kv_heads, head_size)
        # The backend's device may have no index.
        device = query.device if query.device.type == self.device.type else self.device
        for name, rows in (("query", query), ("out", out)):
            check_tensor(name, rows, shape, self.dtype, device)
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            check_tensor(name, cache, cache_shape, self.fp8 or self.dtype, device)
        if k_cache.stride() != v_cache.stride():
            raise ValueError(f"cache strides differ: key {k_cache.stride()}, value {v_cache.stride()}")
        if scoring.softcap < 0 or scoring.window < 0:
            raise ValueError(f"softcap and window must not be negative, got {scoring.softcap} and {scoring.window}")
        if (sinks := scoring.sinks) is not None and (sinks.shape != (self.num_q_heads,) or not sinks.is_contiguous()):
            raise ValueError(f"sinks must be contiguous [{self.num_q_heads}], got {tuple(sinks.shape)}")
        caches = (k_cache, v_cache) if work.copy_kv is None else work.copy_kv(k_cache, v_cache)
        self._launch(out, query, caches, work, scoring)
        return out

    def _launch(
        self, out: torch.Tensor, query: torch.Tensor, caches: Caches, work: DeviceWork, scoring: Scoring
    ) -> None:
        """The launches of `attend`, which has checked the arguments."""
        launch_attention(out, query, caches, work, scoring, first_tile=0, num_tiles=work.num_tiles, is_merging=True)


class PagedAttention(TritonAttention):
    """Paged attention, the first baseline: one launch per layer, every sequence reads its prefix's KV itself.

    Tiles, their shapes, splits and merge are those of `TritonAttention`, so the two differ only in sharing.
    `TritonAttention` computes a group in this way if sharing does not pay.
    """

    name: ClassVar[SharePolicy] = "paged"


def architecture_of(device: torch.device) -> str:
    """The name of the tuned configuration of a device: "sm_90", "gfx942", or "interpreter" for the CPU. Raises
    `ValueError` for a GPU whose matrix units Triton does not use."""
    if device.type != "cuda":
        return "interpreter"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    if properties.major < 8:
        capability = f"{properties.major}.{properties.minor}"
        raise ValueError(f"{properties.name} has compute capability {capability}, 8.0 is needed: set device to cpu")
    return f"sm_{properties.major}{properties.minor}"
