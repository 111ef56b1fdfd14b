"""The books of a run: what each step did, and what each answer cost."""

import time

from engine.execution.compute_ledger import ComputeLedger
from engine.execution.run_steps import ScheduledStep
from engine.execution.step_description import describe_step
from engine.execution.step_record import StepRecord
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence


class StepMetrics:
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
        self._ledger.book(scheduled.step, duration_ms)
        record = describe_step(
            scheduled.step,
            number=self._num_steps,
            held=scheduled.held,
            scheduler=self._scheduler,
            num_finished=num_finished,
            duration_ms=duration_ms,
        )
        self._booked_at = now
        self._num_steps += 1
        return record

    def take_cost_ms(self, sequence: Sequence) -> float:
        """What a sequence cost whose steps are all booked; it is forgotten here."""
        return self._ledger.take(sequence)
