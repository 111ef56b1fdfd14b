"""The engine's loop with prompts computed by another process, in steps of their own, while this one decodes.

A step of prompts is marked as computed when it is sent, because the worker computes in turn; its requests decode when
its KV is here. Nobody loses memory while a step is under way: its blocks are still to be written.
"""

import weakref
from collections import deque
from dataclasses import replace

from engine.config import EngineConfig
from engine.disaggregation.phase_scheduler import PhaseScheduler
from engine.disaggregation.prefill_client import PrefillClient
from engine.execution.memory_budget import resolve_prefill_device
from engine.execution.output import TokenSampler
from engine.execution.step_runner import CommittedSteps, Forward
from engine.kv.kv_cache import KVCache
from engine.model.model import Model
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step import Step


def open_client(
    client: PrefillClient | None, checkpoint: str, config: EngineConfig, cache: KVCache, model: Model
) -> PrefillClient:
    """The process that computes prompts: the one that is there, else a new one, which ends with the model at the last.

    Args:
        client: of an earlier call, if any.
        checkpoint: that the process loads.
        config: of the engine that decodes.
        cache: its KV memory.
        model: that it has loaded.
    """
    if client is None or client.is_closed:
        there = replace(config, device=str(resolve_prefill_device(model.device)))
        client = PrefillClient(checkpoint, there, cache, model.kv_shape)
        weakref.finalize(model, client.close)
    return client


def run_disaggregated(
    scheduler: Scheduler,
    forward: Forward,
    sampler: TokenSampler,
    worker: PrefillClient,
    cache: KVCache,
    *,
    is_compiled: bool,
) -> CommittedSteps:
    """Steps of either kind as they are done; no step has both prompts and decode tokens.

    Args:
        scheduler: of the run.
        forward: computes a batch of decode tokens in this process.
        sampler: makes tokens of hidden states.
        worker: computes batches of prompts.
        cache: the KV memory of this process.
        is_compiled: whether the worker is to compile its layers.
    """
    assert isinstance(scheduler, PhaseScheduler), "steps of both phases"
    under_way: deque[Step] = deque()

    def send_prompts(step: Step | None) -> None:
        """Sends as many steps as may be under way; the first is `step`, which may have counted preemptions."""
        while worker.can_send:
            step = scheduler.schedule_prompts(step)
            if step.is_empty:
                return
            worker.send(step.build_batch(cache.block_size), is_compiled=is_compiled)
            scheduler.mark_computed(step)
            under_way.append(step)
            step = None

    while scheduler.num_unfinished:
        decodes = scheduler.schedule_decodes(may_preempt=not under_way)
        has_decodes = not decodes.is_empty
        if not decodes.is_blocked:  # else the worker runs dry first, so that the latest request can lose its memory
            send_prompts(None if has_decodes else decodes)
        if has_decodes:
            sampler.prepare(decodes)
            hidden = forward(decodes.build_batch(cache.block_size))
            tokens = sampler.sample(hidden, decodes).wait()
            yield decodes, scheduler.commit(decodes, tokens)
        elif not under_way:
            scheduler.evict_idle_prefixes()
            send_prompts(decodes)
            assert under_way, "requests are left, but none of them could be given memory"
        waits = not has_decodes
        while under_way and (prefilled := worker.take(cache, waits=waits)) is not None:
            step = under_way.popleft()
            tokens = sampler.sample(prefilled.to(cache.keys[0].device), step).wait()
            yield step, scheduler.commit(step, tokens)
            waits = False
