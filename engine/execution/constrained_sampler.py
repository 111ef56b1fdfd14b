"""Sampling where requests have grammars: which tokens are allowed in each row, and which follow for certain."""

from collections.abc import Sequence as Sequences
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from engine.device.transfers import to_device
from engine.execution.output import Decoder, TokenSampler
from engine.grammar import Constraint
from engine.kernels import cdiv
from engine.model.model import Model
from engine.request import FinishReason
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import Step

_ALL = -1
"""A word of a mask with every bit set."""

Masks = npt.NDArray[np.int32]


class ConstrainedSampler(TokenSampler):
    """Masks are computed on the host in a thread of their own, while the device computes the step's hidden states.

    Where steps overlap, the tokens of the step before are not known when a step is launched. Masks are made when they
    are, with the step's hidden states still to come (`needs_tokens`).

    Args:
        model: its output layer makes logits of hidden states.
        decode: detokenizer for stop strings of requests without a grammar.
    """

    def __init__(self, model: Model, decode: Decoder | None) -> None:
        super().__init__(model, decode)
        self._constraints: dict[Sequence, Constraint] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="masks")
        self._prepared: tuple[Step, Future[Masks] | None] | None = None

    def prepare(self, step: Step) -> None:
        rows = [
            (row, self._constraint(sequence))
            for row, (sequence, place) in enumerate(step.sampled)
            if sequence.request.grammar is not None and not sequence.is_answered and not sequence.knows(place)
        ]
        masks = self._thread.submit(self._make_masks, rows, len(step.sampled)) if rows else None
        self._prepared = step, masks

    def needs_tokens(self, step: Step) -> bool:
        return any(sequence.request.grammar is not None for sequence, _ in step.sampled)

    def _masks(self, step: Step) -> torch.Tensor | None:
        if self._prepared is None or self._prepared[0] is not step:
            self.prepare(step)
        assert self._prepared is not None
        masks = self._prepared[1]
        self._prepared = None
        return None if masks is None else to_device(masks.result(), self._model.device)

    def _constraint(self, sequence: Sequence) -> Constraint:
        """Made when the first token is to be sampled: requests that wait have none."""
        if sequence not in self._constraints:
            assert sequence.request.grammar is not None
            self._constraints[sequence] = sequence.request.grammar.start(sequence.request.opening)
        return self._constraints[sequence]

    def _make_masks(self, rows: Sequences[tuple[int, Constraint]], num_rows: int) -> Masks:
        """Rows without a constraint, and those whose grammar has failed, allow every token."""
        masks = np.full((num_rows, cdiv(self._model.vocab_size, 32)), _ALL, dtype=np.int32)
        open_rows = [(row, constraint) for row, constraint in rows if not constraint.forced]
        for row, constraint in rows:
            if constraint.forced:
                masks[row] = 0
                masks[row].view(np.uint32)[constraint.forced[0] // 32] = 1 << constraint.forced[0] % 32
        _fill(open_rows, masks)
        failed = [(row, constraint) for row, constraint in open_rows if constraint.error is not None]
        for row, constraint in failed:
            constraint.restart()
            _fill([(row, constraint)], masks)
            if constraint.error is not None:
                masks[row] = _ALL
        return masks

    def _follow(self, sequence: Sequence, place: int, token: int) -> tuple[Sequences[int], FinishReason | None]:
        """Books a token of a grammar's answer, and those that it forces."""
        constraint = self._constraints.get(sequence)
        if constraint is None:
            return super()._follow(sequence, place, token)
        end: FinishReason | None = None
        followers: list[int] = []
        room = sequence.request.max_new_tokens - (place + 1 - sequence.num_suffix)
        if constraint.error is None:
            constraint.accept(token)
            followers = constraint.take_forced(room)
        if constraint.error is not None:
            sequence.error = f"the answer cannot go on: {constraint.error}"
            end = "error"
        elif constraint.has_ended:
            end = "eos"
        elif len(followers) == room and constraint.is_complete:
            end = "stop"
        if end is not None or len(followers) == room:
            del self._constraints[sequence]
        return followers, end


def _fill(rows: Sequences[tuple[int, Constraint]], masks: Masks) -> None:
    if rows:
        rows[0][1].vocabulary.fill_masks([(constraint.matcher, row) for row, constraint in rows], masks)
