"""A model with its KV memory and its attention on one device, and the loop that computes one step after the other."""

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from engine.config import EngineConfig
from engine.device.placement import use_device
from engine.execution.output import TokenSampler
from engine.kv.kv_cache import KVCache
from engine.kv.kv_layout import kept_windows
from engine.model.attention import make_attention
from engine.model.model import Model
from engine.scheduling.policies.packing import PADDED_PACKINGS
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import Step
from engine.scheduling.token_batch import TokenBatch

if TYPE_CHECKING:
    from engine.execution.step_graphs import StepGraphs

Forward = Callable[..., torch.Tensor]
"""Launches a step's batch, see `StepRunner.forward`."""

CommittedSteps = Generator[tuple[Step, list[Sequence]], None, None]
"""Committed steps, in order, each with the sequences that it answers."""


class StepRunner:
    """Computes token batches. Its KV memory is allocated when it is made. `attention` computes the layers, too, where
    the backend has its own; `graphs` are CUDA graphs of decode steps, None where there are none."""

    def __init__(self, model: Model, config: EngineConfig, *, max_model_len: int) -> None:
        """Gives the model its attention and KV; `max_model_len` sizes graphs. Raises as `make_attention`, `KVCache`."""
        self.model = model
        is_cpu_share = model.shard is not None and model.device.type == "cpu"  # native layers are for whole models
        self.attention = make_attention(
            replace(config, attention="torch") if is_cpu_share and config.attention == "auto" else config,
            model.device,
            num_q_heads=model.num_q_heads,
            kv_shape=model.kv_shape,
            has_layers=model.has_own_layers,
        )
        model.use_layers_of(self.attention)
        has_graphs = model.has_plain_layers and model.device.type != "cpu" and config.cuda_graphs != "never"
        graphable = self.attention.graphable if has_graphs else None
        shape = model.kv_shape
        if shape.windows:
            shape = replace(shape, windows=kept_windows(shape.windows, config))
        budget_bytes = config.kv_memory_bytes
        if budget_bytes == "auto":
            from engine.execution.memory_budget import find_kv_budget  # imported only when needed

            budget_bytes = find_kv_budget(config, model, self.attention, graphable)
        self.cache = KVCache(
            shape,
            block_size=config.block_size,
            budget_bytes=budget_bytes if model.shard is None else model.shard.agree(budget_bytes),
            device=model.device,
            has_pad_block=config.packing in PADDED_PACKINGS,
        )
        self.graphs: StepGraphs | None = None
        if graphable is not None:
            from engine.execution import step_graphs as steps  # imported only when needed

            buckets = steps.find_buckets(config.step_tokens)
            self.graphs = steps.StepGraphs(model, self.cache, graphable, buckets=buckets, max_model_len=max_model_len)

    def forward(self, batch: TokenBatch, pending_token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Launches a step, which writes its KV; on a GPU the call returns before the step is computed. Returns last
        hidden states ``[R, hidden]`` of batch.output_rows, before the output layer.

        Args:
            pending_token_ids: int64, tokens that the step before samples, where only the device knows them yet.
        """
        use_device(self.model.device)  # the caller may have computed with another model since the last step
        if self.model.shard is not None:
            self.model.shard.send(batch)
        hidden = None if self.graphs is None else self.graphs.forward(batch, pending_token_ids)
        return self.model.forward(batch, self.cache, self.attention, pending_token_ids) if hidden is None else hidden


def run_steps(scheduler: Scheduler, forward: Forward, sampler: TokenSampler) -> CommittedSteps:
    """Computes one step after the other until every request is answered. See `StepRunner.forward`, `TokenSampler`."""
    while scheduler.num_unfinished:
        step = scheduler.schedule()
        sampler.prepare(step)
        hidden = forward(step.build_batch())
        tokens = sampler.sample(hidden, step).wait()
        yield step, scheduler.commit(step, tokens, sampler.follow)
