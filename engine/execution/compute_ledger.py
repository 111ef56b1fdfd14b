"""What each answer cost: the time of every step, divided among the requests whose tokens it computed."""

from engine.scheduling.prefix_node import PrefixNode
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import Step


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
            for sequence, _ in work:  # one that was swapped out may meet a prefix that was computed again as a decode
                for node in sequence.node.chain() if sequence.node is not None else ():
                    self._add(sequence, self._prefix_ms.pop(node, 0.0))

    def take(self, sequence: Sequence) -> float:
        """The milliseconds of a sequence that is answered; they are forgotten here."""
        return self._sequence_ms.pop(sequence, 0.0)

    def _add(self, sequence: Sequence, ms: float) -> None:
        self._sequence_ms[sequence] = self._sequence_ms.get(sequence, 0.0) + ms
