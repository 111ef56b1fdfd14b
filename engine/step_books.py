"""The books of a run: what each step did, and what each answer cost."""

import time

from engine.compute_ledger import ComputeLedger
from engine.run_steps import ScheduledStep
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.step_record import StepRecord


class StepBooks:
    """Books one step after the other. A step's time is that since the step before, so that steps add up to the run."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._ledger = ComputeLedger()
        self._num_steps = 0
        self._booked_at = time.perf_counter()

    def book(self, scheduled: ScheduledStep, num_finished: int) -> StepRecord:
        """The record of a step that is done.

        Args:
            num_finished: requests that it answers.
        """
        now = time.perf_counter()
        duration_ms = (now - self._booked_at) * 1e3
        step, scheduler = scheduled.step, self._scheduler
        self._ledger.book(step, duration_ms)
        record = StepRecord(
            step=self._num_steps,
            num_decode_tokens=sum(count for _, count in step.decodes),
            num_suffix_tokens=sum(count for _, count in step.suffixes),
            num_prefix_tokens=sum(step.prefixes.values()),
            num_kv_blocks_used=scheduled.num_blocks_used,
            num_prefix_kv_blocks=scheduled.num_prefix_blocks,
            num_request_kv_blocks=scheduled.num_request_blocks,
            num_cached_kv_blocks=scheduled.num_cached_blocks,
            num_kv_blocks_total=scheduler.pool.num_blocks,
            num_running_requests=scheduler.num_running,
            num_waiting_requests=scheduler.num_unfinished - scheduler.num_running,
            num_finished_requests=num_finished,
            num_preempted_requests=step.num_preempted,
            duration_ms=duration_ms,
            num_padding_tokens=step.num_padding_tokens,
            num_swapped_kv_blocks=scheduler.num_swapped_blocks,
        )
        self._booked_at = now
        self._num_steps += 1
        return record

    def take_cost_ms(self, sequence: Sequence) -> float:
        """What a sequence cost whose steps are all booked; it is forgotten here."""
        return self._ledger.take(sequence)
