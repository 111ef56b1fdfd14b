"""The steps of a run, as they are computed: in this process, one ahead or not, or prompts in another one."""

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.disaggregation.prefill_client import PrefillClient
from engine.execution.kv_usage import KVUsage
from engine.execution.output import StepOutputs
from engine.kv.kv_cache import KVCache
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import Step
from engine.scheduling.token_batch import TokenBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScheduledStep:
    """A step that has its memory, and how much of it was held then.

    Attributes:
        batch: the step's rows.
        owners: whose its output rows are: (sequence, number of rows), in row order.
        held: the memory, once the step has its own.
    """

    step: Step
    batch: TokenBatch
    owners: list[tuple[Sequence, int]]
    held: KVUsage

    @classmethod
    def of(cls, step: Step, scheduler: Scheduler, block_size: int) -> "ScheduledStep":
        batch, owners = step.lay_out(block_size)
        return cls(step=step, batch=batch, owners=owners, held=KVUsage.of(scheduler))


ComputedSteps = Generator[tuple[ScheduledStep, torch.Tensor], None, None]
"""Steps and the hidden states of their output rows. What these say is booked before the next step is asked for."""

SubmittedSteps = Generator[tuple[ScheduledStep, StepOutputs], None, None]
"""Steps and what the model says in them, in order; it is booked before the next step is asked for."""

Forward = Callable[[TokenBatch, torch.Tensor | None], torch.Tensor]
"""Launches a step; the tensor holds the tokens that the step before has sampled, where the batch lacks some."""

Submit = Callable[[torch.Tensor, list[tuple[Sequence, int]]], StepOutputs]


def overlaps_steps(config: EngineConfig, device: torch.device) -> bool:
    """Whether a step is scheduled and launched while the device computes the one before.

    A CPU is its own host: nothing would overlap. The block cache of sharing "lru" finds blocks by their tokens, so it
    has to know them; with disaggregation, another process must be told all tokens.
    """
    return device.type != "cpu" and config.sharing != "lru" and config.disaggregation == "none"


def run_here(
    scheduler: Scheduler, forward: Forward, submit: Submit, block_size: int, *, overlaps: bool
) -> SubmittedSteps:
    """One step after the other, prompts and decode tokens mixed as the policies say.

    With overlaps, step n + 1 is launched before the caller gets step n, and with it waits for the device. The two run
    on one stream: KV memory that is freed when step n is booked is written by nobody before step n + 1 is done with it.
    """
    under_way: deque[tuple[ScheduledStep, StepOutputs]] = deque()
    while True:
        step = scheduler.next_step(is_settled=not under_way)
        if not step.is_empty:
            scheduled = ScheduledStep.of(step, scheduler, block_size)
            pending_token_ids = under_way[-1][1].token_ids if under_way else None
            hidden = forward(scheduled.batch, pending_token_ids)
            scheduler.complete_step(step)
            under_way.append((scheduled, submit(hidden, scheduled.owners)))
        elif not under_way:
            return
        if step.is_empty or len(under_way) > overlaps:
            yield under_way.popleft()


class DisaggregatedRun:
    """Prompts in steps of their own, computed by a worker, while this process decodes.

    One scheduler serves both. A step of prompts is booked as computed when it is sent, because the worker computes in
    turn; but its requests decode only when it is back, so what they and their prefixes have written is here by then.
    Nobody loses memory while a step is under way: its blocks are still to be written.

    Args:
        forward: computes a step in this process.
        is_compiled: whether the worker is to compile its layers.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        forward: Callable[[TokenBatch], torch.Tensor],
        worker: PrefillClient,
        cache: KVCache,
        *,
        is_compiled: bool,
    ) -> None:
        self._scheduler = scheduler
        self._forward = forward
        self._worker = worker
        self._cache = cache
        self._is_compiled = is_compiled
        self._under_way: deque[ScheduledStep] = deque()

    def steps(self) -> ComputedSteps:
        """Steps of either kind as they are done; no step has both prompts and decode tokens."""
        scheduler = self._scheduler
        while scheduler.num_unfinished:
            step = scheduler.new_step()
            has_memory = scheduler.add_decodes(step, may_preempt=not self._under_way)
            decodes = None if step.is_empty else ScheduledStep.of(step, scheduler, self._cache.block_size)
            if has_memory:  # else the worker is to run dry, so that memory can be taken from the latest request
                self._send_prompts(scheduler.new_step() if decodes is not None else step)
            if decodes is not None:
                decoded = self._forward(decodes.batch)
                scheduler.complete_step(decodes.step)
                yield decodes, decoded
            elif not self._under_way:
                scheduler.evict_idle_prefixes()
                self._send_prompts(step)
                assert self._under_way, "requests are left, but none of them could be given memory"
            waits = decodes is None
            while self._under_way and (hidden := self._worker.take(self._cache, waits=waits)) is not None:
                yield self._under_way.popleft(), hidden.to(self._cache.keys[0].device)
                waits = False

    def _send_prompts(self, step: Step) -> None:
        """Sends as many steps as may be under way; the first is `step`, which may hold what preemption has booked."""
        while self._worker.can_send:
            self._scheduler.add_prompts(step)
            if step.is_empty:
                return
            scheduled = ScheduledStep.of(step, self._scheduler, self._cache.block_size)
            self._worker.send(scheduled.batch, is_compiled=self._is_compiled)
            self._scheduler.complete_step(step)
            self._under_way.append(scheduled)
            step = self._scheduler.new_step()
