"""The engine's loop with two processes: a worker computes steps of prompts while this process decodes.

A step of prompts counts as computed once it is sent, because the worker computes its steps in order. Its requests
decode once its KV is in this process. No request is preempted while a step in flight still writes KV.
"""

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from engine.config import EngineConfig
from engine.disaggregation.prefill_client import PrefillClient
from engine.execution.memory_budget import resolve_prefill_device
from engine.execution.output import TokenSampler
from engine.execution.step_runner import CommittedSteps, Forward, StepRunner
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step import Step


class PromptProcess:
    """The worker process that computes prompts for an engine, with the engine's `checkpoint`, `config` and `runner`.
    The first run starts it. It ends with the engine, with this process, and with a run that ends early."""

    def __init__(self, checkpoint: str, config: EngineConfig, runner: StepRunner) -> None:
        self._checkpoint = checkpoint
        self._config = replace(config, device=str(resolve_prefill_device(runner.model.device)))
        self._runner = runner
        self.client: PrefillClient | None = None
        self._end: Callable[[], object]  # kills the client's process once; set with the client

    def run(self, scheduler: Scheduler, sampler: TokenSampler) -> CommittedSteps:
        """See `run_disaggregated`."""
        model = self._runner.model
        if self.client is None:
            self.client = PrefillClient(self._checkpoint, self._config, self._runner.cache, model.kv_shape)
            self._end = weakref.finalize(model, self.client.close)
        try:
            forward, is_compiled = self._runner.forward, model.is_compiled
            yield from run_disaggregated(scheduler, forward, sampler, self.client, is_compiled=is_compiled)
        except BaseException:
            self._end()  # the steps in flight are not needed
            self.client = None
            raise


def run_disaggregated(
    scheduler: Scheduler, forward: Forward, sampler: TokenSampler, worker: PrefillClient, *, is_compiled: bool
) -> CommittedSteps:
    """Computes steps of prompts and steps of decode tokens, and yields them as they are committed.

    Args:
        forward, worker: compute decode tokens in this process, and prompts in another one.
        is_compiled: whether the worker compiles its layers.
    """
    in_flight: deque[Step] = deque()

    def send_prompts() -> None:
        """Sends as many steps as may be in flight."""
        while worker.can_send and not (step := scheduler.schedule("prompts")).is_empty:
            worker.send(step.build_batch(), is_compiled=is_compiled)
            in_flight.append(step)

    while scheduler.num_unfinished:
        decodes, batch = scheduler.schedule("decodes"), None
        if not decodes.is_empty:  # an empty step becomes the next step of prompts
            sampler.prepare(decodes)
            batch = decodes.build_batch()
        if not decodes.is_blocked:  # else the steps in flight end first, so that a request can be preempted
            send_prompts()
        if batch is not None:
            tokens = sampler.sample(forward(batch), decodes).wait()
            yield decodes, scheduler.commit(decodes, tokens, sampler.follow)
        waits = batch is None
        while in_flight and (prefilled := worker.take(waits=waits)) is not None:
            step = in_flight.popleft()
            tokens = sampler.sample(prefilled, step).wait()
            yield step, scheduler.commit(step, tokens, sampler.follow)
            waits = False
