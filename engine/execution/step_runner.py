"""A model with its KV memory and its attention on one device: computes token batches."""

from typing import TYPE_CHECKING

import torch

from engine.config import EngineConfig
from engine.device.placement import kv_budget_bytes
from engine.execution.memory_profile import MemoryProfile, TorchCounters, measure_memory
from engine.execution.step_graphs import BUCKETS, StepGraphs, device_graphs, graph_bytes
from engine.kernels.cpu.native import NativeKernels
from engine.kv.kv_cache import KVCache
from engine.model.attention import make_attention
from engine.model.model import Model
from engine.scheduling.policies.packing import PADDED_PACKINGS
from engine.scheduling.token_batch import TokenBatch

if TYPE_CHECKING:
    from engine.kernels.triton.triton_attention import TritonAttention


class StepRunner:
    """Takes its KV memory when it is made.

    Attributes:
        model: computed by `attention`; on the CPU its layers may be replaced by native ones.
        graphs: of decode steps; None where there are none.
    """

    def __init__(self, model: Model, config: EngineConfig, *, max_model_len: int) -> None:
        """Takes a model over.

        Args:
            max_model_len: longest prompt plus answer, in tokens.
        Raises:
            ConfigError: the attention backend does not run on the device, or does not cover the shape.
            CapacityError: the KV budget holds no block.
        """
        self.model = model
        is_cpu = model.device.type == "cpu"
        self.attention = make_attention(
            "torch" if config.attention == "auto" and is_cpu and not model.is_swiglu else config.attention,
            num_q_heads=model.num_q_heads,
            kv_shape=model.kv_shape,
            block_size=config.block_size,
            device=model.device,
        )
        if isinstance(self.attention, NativeKernels):
            model.use_native_layers(self.attention)
        graphable = None if is_cpu or config.cuda_graphs == "never" else self._graphable_attention()
        self.cache = KVCache(
            model.kv_shape,
            block_size=config.block_size,
            budget_bytes=kv_budget_bytes(config, model.device, lambda: self._measure_memory(config, graphable)),
            device=model.device,
            has_pad_block=config.packing in PADDED_PACKINGS,
        )
        self.graphs: StepGraphs | None = None
        if graphable is not None:
            self.graphs = StepGraphs(
                model, self.cache, graphable, max_model_len=max_model_len, make_graph=device_graphs()
            )

    def forward(self, batch: TokenBatch, pending_token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Launches a step, which writes its KV; on a GPU the result is there when the device gets so far.

        Args:
            pending_token_ids: int64, tokens sampled by the previous step, where only the device knows them yet.
        Returns:
            ``[R, hidden]`` last hidden states of batch.output_rows, before the output layer.
        """
        hidden = None if self.graphs is None else self.graphs.forward(batch, pending_token_ids)
        return self.model.forward(batch, self.cache, self.attention, pending_token_ids) if hidden is None else hidden

    def _graphable_attention(self) -> "TritonAttention | None":
        """The attention backend, where CUDA graphs can be made of what it launches."""
        from engine.kernels.triton.triton_attention import TritonAttention  # not installed everywhere

        attention = self.attention
        return attention if isinstance(attention, TritonAttention) and attention.has_fixed_launches else None

    def _measure_memory(self, config: EngineConfig, graphable: "TritonAttention | None") -> MemoryProfile:
        return measure_memory(
            self.model,
            self.attention,
            config,
            TorchCounters(self.model.device),
            graph_share=0.0 if graphable is None else min(1.0, BUCKETS[-1] / config.max_num_batched_tokens),
            graph_bytes=0 if graphable is None else graph_bytes(graphable),
        )
