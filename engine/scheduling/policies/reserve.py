"""How much KV memory is set aside for an answer that has not been written yet."""

import math
from dataclasses import dataclass

from engine.request import Request
from engine.scheduling.sequence import Sequence, most_extra_tokens

_ANSWERS_FOR_AN_ESTIMATE = 16


@dataclass(slots=True)
class _Tally:
    """Answers of this run beside what was expected of them (1 token each where there was no estimate)."""

    num_answers: int = 0
    num_expected_tokens: int = 0
    num_tokens: int = 0


class OutputReserve:
    """Expected answer lengths, refined by the answers of the run.

    At first a request's own estimate is believed, or its max_new_tokens where it has none. After 16 answers, estimates
    are scaled by how far off they have been so far, and requests without one expect the mean. Neither expects more than
    max_new_tokens.

    Args:
        share: of the expected length that is set aside; 0 admits by what is held now (Algorithm 2 of BatchLLM), 1
            leaves preemption to answers longer than expected.
    """

    __slots__ = ("_estimated", "_share", "_unestimated")

    def __init__(self, share: float) -> None:
        self._share = share
        self._estimated = _Tally()
        self._unestimated = _Tally()

    def book(self, sequence: Sequence) -> None:
        """Learns from a finished answer."""
        if sequence.request.mode == "generate":
            tally = self._tally(sequence.request)
            tally.num_answers += 1
            tally.num_expected_tokens += sequence.request.expected_output_tokens or 1
            tally.num_tokens += sequence.num_output_tokens

    def num_tokens(self, sequence: Sequence) -> int:
        """Own tokens to have memory for: those known, and the share of those still expected."""
        most = most_extra_tokens(sequence.request)
        num_own_tokens = sequence.num_suffix + min(self._expected_tokens(sequence.request), most)
        return sequence.length + math.ceil(max(0, num_own_tokens - sequence.length) * self._share)

    def _expected_tokens(self, request: Request) -> int:
        estimate = request.expected_output_tokens
        tally = self._tally(request)
        if request.mode == "score" or tally.num_answers < _ANSWERS_FOR_AN_ESTIMATE:
            return request.max_new_tokens if estimate is None else estimate
        return math.ceil((estimate or 1) * tally.num_tokens / tally.num_expected_tokens)

    def _tally(self, request: Request) -> _Tally:
        return self._unestimated if request.expected_output_tokens is None else self._estimated
