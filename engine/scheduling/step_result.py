"""What a step gives: the tokens that were sampled, and the sequences that these answer."""

from collections.abc import Callable, Container
from collections.abc import Sequence as Sequences
from dataclasses import dataclass

from engine.completion import FinishReason
from engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """The tokens sampled in one step.

    Attributes:
        token_ids: one for each row of `Step.sampled`.
        watched_rows: indices of those that may end their answer, or force the tokens that follow.
        follow: called in order, with each watched row whose token becomes part of its answer. Returns the forced tokens
            that follow, as many as the answer has room for, and why the answer ends with them, unless by its length.
    """

    token_ids: Sequences[int]
    watched_rows: Container[int]
    follow: Callable[[int], tuple[Sequences[int], FinishReason | None]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answered:
    """A sequence that is answered, or ended with an error because its memory was taken. With a late row, the step in
    flight still computes a row of the sequence, whose result is dropped."""

    sequence: Sequence
    reason: FinishReason
    has_late_row: bool = False
