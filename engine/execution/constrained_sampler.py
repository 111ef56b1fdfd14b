"""Sampling of requests with thoughts or grammars: the tokens that each row allows, and the forced tokens after it."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Sequences
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from engine.completion import FinishReason
from engine.device.transfers import to_device
from engine.execution.output import Decoder, TokenSampler
from engine.grammar import Constraint
from engine.kernels import cdiv
from engine.model.model import Model
from engine.pooling.pooler import Pooler
from engine.request import Mode
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import Step

_ALL = -1
"""A word of a mask that allows all its 32 tokens."""

Masks = npt.NDArray[np.int32]


class ConstrainedSampler(TokenSampler):
    """Masks the logits. A thread of the host computes the masks while the device computes the step's hidden states.

    Where steps overlap, the tokens of the step before are not known when a step is launched. Then masks are computed
    once these tokens are known, while the device computes the step (`needs_tokens`). See `TokenSampler`.
    """

    def __init__(self, model: Model, decode: Decoder | None, poolers: Mapping[Mode, Pooler] | None = None) -> None:
        super().__init__(model, decode, poolers)
        self._constraints: dict[Sequence, Constraint] = {}
        self._starts: dict[Sequence, int] = {}  # own token at which the answer starts, once its thoughts have ended
        self._thinking_mask = _allow_all_but(model.eos_token_ids, model.vocab_size)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="masks")
        self._prepared: tuple[Step, Future[Masks] | None] | None = None

    def prepare(self, step: Step) -> None:
        rows: list[tuple[int, Constraint | None, list[int]]] = []
        for row, (sequence, place) in enumerate(step.sampled):
            if self._needs_mask(sequence) and not sequence.finish_reason and place == sequence.num_known:
                constraint = None if self._is_thinking(sequence) else self._constraint(sequence)
                rows.append((row, constraint, sequence.own_token_ids[place : place + sequence.num_guesses].tolist()))
        masks = self._thread.submit(self._make_masks, rows, len(step.sampled)) if rows else None
        self._prepared = step, masks

    def needs_tokens(self, step: Step) -> bool:
        return super().needs_tokens(step) or any(self._needs_mask(sequence) for sequence, _ in step.sampled)

    def count_allowed(self, sequence: Sequence, token_ids: npt.NDArray[np.int32]) -> int:
        """See `TokenSampler.count_allowed`; tokens that end the thoughts or the answer are not allowed."""
        request, token_list = sequence.request, token_ids.tolist()
        if self._is_thinking(sequence):
            assert request.thinking is not None
            for index, token in enumerate(token_list):
                num_thoughts = sequence.num_output_tokens + index + 1
                if token in self._model.eos_token_ids or request.thinking.follow(token, num_thoughts) is not None:
                    return index
        elif request.grammar is not None:
            return self._constraint(sequence).count_allowed(token_list)
        return len(token_list)

    def _masks(self, step: Step) -> torch.Tensor | None:
        if self._prepared is None or self._prepared[0] is not step:
            self.prepare(step)
        assert self._prepared is not None
        masks = self._prepared[1]
        self._prepared = None
        return None if masks is None else to_device(masks.result(), self._model.device)

    def _is_thinking(self, sequence: Sequence) -> bool:
        return sequence.request.thinking is not None and sequence not in self._starts

    def _needs_mask(self, sequence: Sequence) -> bool:
        """Whether the next token must be among some tokens."""
        return sequence.request.grammar is not None or self._is_thinking(sequence)

    def _constraint(self, sequence: Sequence) -> Constraint:
        """The answer's constraint, made when its first token is sampled: waiting requests need none."""
        if sequence not in self._constraints:
            assert sequence.request.grammar is not None
            self._constraints[sequence] = Constraint(sequence.request.grammar, sequence.request.opening)
        return self._constraints[sequence]

    def _make_masks(self, masked: Sequences[tuple[int, Constraint | None, list[int]]], num_rows: int) -> Masks:
        """The masks of a step. Rows that are not in `masked` or whose grammar has failed allow every token.

        Args:
            masked: for each answer its first row, its constraint (None within thoughts), and the guesses of its further
                rows.
        """
        masks = np.full((num_rows, cdiv(self._model.vocab_size, 32)), _ALL, dtype=np.int32)
        rows: list[tuple[int, Constraint]] = []
        for first, constraint, guesses in masked:
            if constraint is None:
                masks[first : first + 1 + len(guesses)] = self._thinking_mask
            else:
                rows += enumerate((constraint, *constraint.goes_on(guesses)), first)
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
        """Accepts a token of thoughts or of an answer, and the tokens that it forces."""
        request = sequence.request
        start, most, closing = sequence.num_suffix, request.max_new_tokens, list[int]()
        if request.thinking is not None:
            most -= request.thinking.max_tokens
            if self._is_thinking(sequence):
                end_of_thoughts = request.thinking.follow(token, place + 1 - start)
                if end_of_thoughts is None:
                    return (), None
                closing = list(end_of_thoughts)
                self._starts[sequence] = place + 1 + len(closing)
            start = self._starts[sequence]
        room = start + most - (place + 1 + len(closing))
        followers: Sequences[int] = ()
        end: FinishReason | None = None
        if request.grammar is not None:
            followers, end = self._follow_grammar(sequence, None if room == most else token, room)
        elif room < most:
            end = self._find_end(sequence, place, token, start)
        if end is None and len(followers) == room:
            end = "length"
        if end is not None:
            self._constraints.pop(sequence, None)
            self._starts.pop(sequence, None)
        return [*closing, *followers], end

    def _follow_grammar(
        self, sequence: Sequence, token: int | None, room: int
    ) -> tuple[Sequences[int], FinishReason | None]:
        """Accepts a token of an answer (None: the thoughts have just ended); takes at most `room` forced ones."""
        constraint = self._constraint(sequence)
        followers: list[int] = []
        if constraint.error is None:
            if token is not None:
                constraint.accept(token)
            followers = constraint.take_forced(room)
        if constraint.error is not None:
            sequence.error = f"the answer cannot go on: {constraint.error}"
            return followers, "error"
        if constraint.has_ended:
            return followers, "eos"
        return followers, "stop" if len(followers) == room and constraint.is_complete else None


def _fill(rows: Sequences[tuple[int, Constraint]], masks: Masks) -> None:
    if rows:
        rows[0][1].vocabulary.fill_masks([(constraint.matcher, row) for row, constraint in rows], masks)


def _allow_all_but(token_ids: Iterable[int], vocab_size: int) -> Masks:
    """A mask row that allows all tokens but these."""
    mask = np.full(cdiv(vocab_size, 32), _ALL, dtype=np.int32)
    for token_id in token_ids:
        mask.view(np.uint32)[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
    return mask
