"""From a step that is done to its record, whoever computed it: a model, or the arithmetic of a simulation."""

from engine.execution.kv_usage import KVUsage
from engine.execution.step_record import StepRecord
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step import Step


def describe_step(
    step: Step, *, number: int, held: KVUsage, scheduler: Scheduler, num_finished: int, duration_ms: float
) -> StepRecord:
    """The record of a step that is done and booked.

    Args:
        number: of the step within the run, from 0.
        held: the memory when the step had its own.
        scheduler: as it is after the step.
        num_finished: requests that the step answers.
    """
    return StepRecord(
        step=number,
        num_decode_tokens=sum(count for _, count in step.decodes),
        num_suffix_tokens=sum(count for _, count in step.suffixes),
        num_prefix_tokens=sum(step.prefixes.values()),
        num_kv_blocks_used=held.num_used,
        num_prefix_kv_blocks=held.num_prefix,
        num_request_kv_blocks=held.num_request,
        num_cached_kv_blocks=held.num_cached,
        num_kv_blocks_total=scheduler.pool.num_blocks,
        num_running_requests=scheduler.num_running,
        num_waiting_requests=scheduler.num_unfinished - scheduler.num_running,
        num_finished_requests=num_finished,
        num_preempted_requests=step.num_preempted,
        duration_ms=duration_ms,
        num_padding_tokens=step.num_padding_tokens,
        num_swapped_kv_blocks=scheduler.num_swapped_blocks,
    )
