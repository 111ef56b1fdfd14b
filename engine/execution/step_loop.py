"""The engine's loop: schedule, build the batch, forward, sample, commit."""

from collections.abc import Generator
from typing import Protocol

import torch

from engine.config import EngineConfig
from engine.execution.output import PendingTokens, TokenSampler
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step import Answered, Step
from engine.scheduling.token_batch import TokenBatch

CommittedSteps = Generator[tuple[Step, list[Answered]], None, None]
"""Steps that are done, in order, each with the sequences that it answers."""


class Forward(Protocol):
    """Launches a step; on a GPU the result is there when the device gets so far."""

    def __call__(self, batch: TokenBatch, pending_token_ids: torch.Tensor | None = None) -> torch.Tensor: ...


def run_steps(
    scheduler: Scheduler, forward: Forward, sampler: TokenSampler, block_size: int, *, runs_ahead: bool
) -> CommittedSteps:
    """One step after the other, prompts and decode tokens mixed as the policies say.

    Running ahead, the device is given step n + 1 before the host waits for the tokens of step n. Both run on one
    stream, so KV memory that the commit of step n frees is not written before step n + 1 is done with it. Where step
    n + 1 would need to take somebody's memory, or has nothing to do, step n is committed first.

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
            hidden = forward(step.build_batch(block_size), None if under_way is None else under_way.token_ids)
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
    has to know them; with disaggregation, another process must be told all tokens.
    """
    return device.type != "cpu" and config.sharing != "lru" and config.disaggregation == "none"
