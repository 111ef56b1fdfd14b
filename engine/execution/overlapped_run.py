"""The loop in which the host's part of a step overlaps the device's."""

from engine.config import EngineConfig
from engine.execution.output import PendingTokens, TokenSampler
from engine.execution.step_runner import CommittedSteps, Forward
from engine.scheduling.scheduler import Scheduler


def run_overlapped(scheduler: Scheduler, forward: Forward, sampler: TokenSampler) -> CommittedSteps:
    """Computes steps as `run_steps` does, but launches step n + 1 before the host waits for the tokens of step n.

    Both steps run on one stream, so KV memory that the commit of step n frees is not written before step n + 1 has read
    it. Step n is committed first where step n + 1 would have to preempt a request, or has nothing to do; while the
    device computes step n + 1 where the tokens of step n decide which ones it allows. See `run_steps`."""
    launched: PendingTokens | None = None
    while scheduler.num_unfinished or launched is not None:
        previous, launched = launched, None
        step = scheduler.schedule()
        if not step.is_empty:
            if previous is None:
                sampler.prepare(step)
            hidden = forward(step.build_batch(), None if previous is None else previous.token_ids)
            if previous is not None and sampler.needs_tokens(step):
                tokens = previous.wait()
                yield previous.step, scheduler.commit(previous.step, tokens, sampler.follow)
                previous = None
            launched = sampler.sample(hidden, step)
        if previous is not None:
            tokens = previous.wait()
            yield previous.step, scheduler.commit(previous.step, tokens, sampler.follow)


def can_overlap(config: EngineConfig) -> bool:
    """Whether steps on a GPU may overlap: the next one is scheduled before the tokens of the step before are known. The
    block cache of sharing "lru" and prompt lookup need every token's value, and with disaggregation all tokens are sent
    to another process. On a CPU nothing would overlap: host and device are the same processor."""
    return config.sharing != "lru" and config.disaggregation == "none" and config.prompt_lookup == "never"
