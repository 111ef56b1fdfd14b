"""A model with its KV memory and its attention on one device, and the loop that computes steps there."""

from collections.abc import Callable, Generator
from dataclasses import replace

import torch

from engine.config import EngineConfig
from engine.execution.output import PendingTokens, TokenSampler
from engine.execution.step_graphs import StepGraphs, make_graphs
from engine.kv.kv_cache import KVCache
from engine.model.attention import make_attention
from engine.model.model import Model
from engine.scheduling.policies.packing import PADDED_PACKINGS
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step import Answered, Step
from engine.scheduling.token_batch import TokenBatch

Forward = Callable[..., torch.Tensor]
"""Launches a step, as `StepRunner.forward` does."""

CommittedSteps = Generator[tuple[Step, list[Answered]], None, None]
"""Steps that are done, in order, each with the sequences that it answers."""


class StepRunner:
    """Takes its KV memory when it is made.

    Attributes:
        model: its attention is computed by `attention`, and its layers where that brings its own.
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
        is_cpu_share = model.shard is not None and model.device.type == "cpu"  # native layers are for whole models
        make = make_attention
        if config.deterministic:
            from engine.model.deterministic import make_deterministic as make  # most nights need not be
        self.attention = make(
            "torch" if is_cpu_share and config.attention == "auto" else config.attention,
            num_q_heads=model.num_q_heads,
            kv_shape=model.kv_shape,
            block_size=config.block_size,
            device=model.device,
            has_layers=model.has_own_layers,
        )
        model.use_layers_of(self.attention)
        has_graphs = model.has_plain_layers and model.device.type != "cpu" and config.cuda_graphs != "never"
        graphable = self.attention.graphable if has_graphs else None
        shape = model.kv_shape
        if shape.windows:
            from engine.kv.kv_layout import kept_windows  # most models have no windows

            shape = replace(shape, windows=kept_windows(shape.windows, config))
        budget_bytes = config.kv_memory_bytes
        if budget_bytes == "auto":
            from engine.execution.memory_budget import find_kv_budget  # else nothing is measured

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
            self.graphs = make_graphs(graphable, model, self.cache, config.step_tokens, max_model_len)

    def forward(self, batch: TokenBatch, pending_token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Launches a step, which writes its KV; on a GPU the result is there when the device gets so far.

        Args:
            pending_token_ids: int64, tokens sampled by the previous step, where only the device knows them yet.
        Returns:
            ``[R, hidden]`` last hidden states of batch.output_rows, before the output layer.
        """
        if self.model.shard is not None:
            self.model.shard.send(batch)
        hidden = None if self.graphs is None else self.graphs.forward(batch, pending_token_ids)
        return self.model.forward(batch, self.cache, self.attention, pending_token_ids) if hidden is None else hidden


def run_steps(
    scheduler: Scheduler, forward: Forward, sampler: TokenSampler, block_size: int, *, runs_ahead: bool
) -> CommittedSteps:
    """One step after the other, prompts and decode tokens mixed as the policies say.

    Running ahead, the device is given step n + 1 before the host waits for the tokens of step n. Both run on one
    stream, so KV memory that the commit of step n frees is not written before step n + 1 is done with it. Where step
    n + 1 would need to take somebody's memory, or has nothing to do, step n is committed first. Where tokens of step n
    say which ones are allowed in step n + 1, step n is committed while the device computes step n + 1.

    Args:
        scheduler: of the run.
        forward: launches a batch; tokens that only the device knows are taken from its second argument.
        sampler: makes tokens of hidden states.
        block_size: tokens in a KV block.
        runs_ahead: see `can_run_ahead`.
    """
    under_way: PendingTokens | None = None
    while scheduler.num_unfinished or under_way is not None:
        step = scheduler.schedule(is_settled=under_way is None)
        launched = None
        if not step.is_empty:
            if under_way is None:
                sampler.prepare(step)
            hidden = forward(step.build_batch(block_size), None if under_way is None else under_way.token_ids)
            if under_way is not None and sampler.needs_tokens(step):
                scheduler.mark_computed(step)
                tokens = under_way.wait()
                yield under_way.step, scheduler.commit(under_way.step, tokens)
                under_way = None
            launched = sampler.sample(hidden, step)
            if runs_ahead:
                scheduler.advance(step)
            else:
                under_way, launched = launched, None
        if under_way is not None:
            tokens = under_way.wait()
            yield under_way.step, scheduler.commit(under_way.step, tokens)
        under_way = launched


def can_run_ahead(config: EngineConfig, device: torch.device) -> bool:
    """Whether a step may be scheduled and launched while the device computes the one before.

    A CPU is its own host: nothing would overlap. The block cache of sharing "lru" finds blocks by their tokens, so it
    has to know them, and so has a guess at the next ones; with disaggregation, another process must be told all tokens.
    """
    return (
        device.type != "cpu"
        and config.sharing != "lru"
        and config.disaggregation == "none"
        and config.prompt_lookup == "never"
    )
