"""What each step of a run did, and what each answer cost. Metrics observe: they change nothing."""

import time
from collections.abc import Iterable

from engine.execution.step_record import StepRecord, record_step
from engine.scheduling.prefix_node import PrefixNode
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import Answered, Step


class StepMetrics:
    """Records one step after the other. A step's time is that since the step before, so steps add up to the run."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._ledger = ComputeLedger()
        self._num_steps = 0
        self._recorded_at = time.perf_counter()

    def record(self, step: Step, answered: Iterable[Answered]) -> StepRecord:
        """The record of a step that is committed.

        Args:
            step: the next one.
            answered: what its commit returned.
        """
        now = time.perf_counter()
        duration_ms = (now - self._recorded_at) * 1e3
        self._ledger.book(step, duration_ms)
        record = record_step(step, answered, self._scheduler, number=self._num_steps, duration_ms=duration_ms)
        self._recorded_at = now
        self._num_steps += 1
        return record

    def take_cost_ms(self, sequence: Sequence) -> float:
        """Cost of a sequence whose steps are all recorded; it is forgotten here."""
        return self._ledger.take(sequence)


class ComputeLedger:
    """Milliseconds by sequence. Every millisecond booked is taken by exactly one sequence in the end.

    A step's time is divided in proportion to the tokens it computed. A prefix's share waits for the first request that
    runs on it, which is the one that is charged with its tokens (`Sequence.num_charged`); so does the share of a prefix
    that was freed and computed again.
    """

    __slots__ = ("_prefix_ms", "_sequence_ms")

    def __init__(self) -> None:
        self._sequence_ms: dict[Sequence, float] = {}
        self._prefix_ms: dict[PrefixNode, float] = {}

    def book(self, step: Step, duration_ms: float) -> None:
        """Divides the time of a step that is done."""
        work = (*step.decodes, *step.suffixes)
        ms_per_token = duration_ms / (sum(count for _, count in work) + sum(step.prefixes.values()))
        for sequence, count in work:
            self._add(sequence, count * ms_per_token)
        for node, count in step.prefixes.items():
            self._prefix_ms[node] = self._prefix_ms.get(node, 0.0) + count * ms_per_token
        if self._prefix_ms:
            for sequence, _ in work:  # a decode, too: one that was swapped out may meet a prefix computed again
                for node in sequence.node.chain() if sequence.node is not None else ():
                    self._add(sequence, self._prefix_ms.pop(node, 0.0))

    def take(self, sequence: Sequence) -> float:
        """The milliseconds of a sequence that is answered; they are forgotten here."""
        return self._sequence_ms.pop(sequence, 0.0)

    def _add(self, sequence: Sequence, ms: float) -> None:
        self._sequence_ms[sequence] = self._sequence_ms.get(sequence, 0.0) + ms
