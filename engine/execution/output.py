"""From a step's hidden states to answers: sampling, the end of an answer, label scores."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Sequences
from dataclasses import dataclass

import numpy as np
import torch

from engine.device.transfers import HostCopies, to_device
from engine.execution.label_scores import LabelRows
from engine.execution.sampler import ROWS_AT_ONCE, sample
from engine.model.model import Model
from engine.request import Completion, FinishReason, Request
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence

Decoder = Callable[[Sequences[int]], str]
"""The caller's detokenizer: token ids to text."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepOutputs:
    """What the model says in one step; the device may still be computing it.

    Attributes:
        token_ids: int64 ``[n]`` on the device, one token for each sampled row.
        sampled: (sequence, which of its own tokens), for each of these.
        labels: rows that score labels.
        copies: of all that is computed, on their way to the host.
    """

    token_ids: torch.Tensor
    sampled: list[tuple[Sequence, int]]
    labels: LabelRows
    copies: HostCopies


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answered:
    """A sequence that is answered. With has_late_row, the step under way computes a row of it in vain."""

    sequence: Sequence
    reason: FinishReason
    has_late_row: bool


class OutputProcessor:
    """Gives each output row to its sequence, and each finished sequence to the requests that own it."""

    def __init__(
        self, requests: Sequences[Request], model: Model, scheduler: Scheduler, decode: Decoder | None
    ) -> None:
        self._requests = requests
        self._model = model
        self._scheduler = scheduler
        self._decode = decode

    def submit(self, hidden: torch.Tensor, outputs: Sequences[tuple[Sequence, int]]) -> StepOutputs:
        """Has the device sample and score a step's rows, and books what follows without knowing what they say.

        An answer goes on with a token that only the device knows, unless it is as long as it may be; a label is
        followed by the next one. So the next step can be scheduled before this one is done.

        Args:
            hidden: ``[R, hidden]``, last hidden states of the output rows.
            outputs: whose rows they are, (sequence, number of rows) in row order; R rows in all. Their step is booked
                as computed.
        """
        starts = np.cumsum([0, *(count for _, count in outputs)]).tolist()
        owners = [(sequence, row, count) for (sequence, count), row in zip(outputs, starts, strict=False)]
        sampled = [(sequence, row) for sequence, row, _ in owners if sequence.request.mode == "generate"]
        token_ids = self._sample(hidden, sampled)
        labels = LabelRows.of([owner for owner in owners if owner[0].request.mode == "score"])
        scores = labels.score(hidden, self._model, ROWS_AT_ONCE)
        copies = HostCopies([token_ids, *scores])
        places = []
        for index, (sequence, _) in enumerate(sampled):
            places.append((sequence, sequence.length))
            if sequence.num_output_tokens + 1 < sequence.request.max_new_tokens:
                sequence.append(-1 - index)
                self._scheduler.continue_decoding(sequence)
        for sequence in labels.start_next():
            self._scheduler.continue_decoding(sequence)
        return StepOutputs(token_ids=token_ids, sampled=places, labels=labels, copies=copies)

    def collect(self, outputs: StepOutputs) -> Iterator[Answered]:
        """Waits for what a step says and books it; gives what is answered by it, its memory freed.

        Steps are collected in the order in which they were submitted, at the latest before the next but one is.
        """
        token_ids, *scores = outputs.copies.wait()
        for (sequence, place), token in zip(outputs.sampled, token_ids.tolist(), strict=True):
            if sequence.is_answered:
                continue
            sequence.settle(place, token)
            reason = self._finish_reason(sequence, place)
            if reason is not None:
                sequence.end_at(place + 1)
                has_late_row = sequence.num_uncomputed == 0
                self._scheduler.finish(sequence)
                yield Answered(sequence=sequence, reason=reason, has_late_row=has_late_row)
        for sequence in outputs.labels.book(scores):
            sequence.end_at(sequence.num_suffix)
            self._scheduler.finish(sequence)
            yield Answered(sequence=sequence, reason="scored", has_late_row=False)

    def complete(self, sequence: Sequence, reason: FinishReason, compute_ms: float) -> Iterator[Completion]:
        """The answer of each request that owns a finished sequence; only the first one paid for it."""
        token_ids = tuple(sequence.output_token_ids)
        scores = sequence.label_scores
        logprobs = tuple((scores - np.logaddexp.reduce(scores)).tolist()) if reason == "scored" else ()
        for place, owner in enumerate(sequence.owners):
            request = self._requests[owner]
            num_prompt_tokens = len(request.token_ids)
            num_cached = sequence.num_cached_tokens if place == 0 else num_prompt_tokens
            yield Completion(
                request_id=request.request_id,
                finish_reason=reason,
                token_ids=token_ids,
                label_logprobs=logprobs,
                num_prompt_tokens=num_prompt_tokens,
                num_cached_tokens=num_cached,
                num_output_tokens=len(token_ids),
                compute_ms=compute_ms if place == 0 else 0.0,
            )

    def refuse(self, sequence: Sequence, error: str, compute_ms: float) -> Iterator[Completion]:
        """The same error for each request that owns a sequence that is not answered; the first one paid for it."""
        for place, owner in enumerate(sequence.owners):
            request = self._requests[owner]
            yield Completion(
                request_id=request.request_id,
                finish_reason="error",
                num_prompt_tokens=len(request.token_ids),
                compute_ms=compute_ms if place == 0 else 0.0,
                error=error,
            )

    def _sample(self, hidden: torch.Tensor, rows: Sequences[tuple[Sequence, int]]) -> torch.Tensor:
        if len(rows) < len(hidden):
            index = np.array([row for _, row in rows], dtype=np.int64)
            hidden = hidden.index_select(0, to_device(index, hidden.device))
        requests = [sequence.request for sequence, _ in rows]
        return sample(hidden, self._model, requests, [sequence.num_output_tokens for sequence, _ in rows])

    def _finish_reason(self, sequence: Sequence, place: int) -> FinishReason | None:
        """Why an answer ends with own token `place`, if it does."""
        request = sequence.request
        token = int(sequence.own_tokens(place, place + 1)[0])
        if token in self._model.eos_token_ids and not request.ignore_eos:
            return "eos"
        if request.stop and self._decode is not None:
            # A token adds at least a byte of text, so a stop string that just ended began within this many tokens.
            most_tokens = max(len(text.encode()) for text in request.stop) + 4
            first = max(sequence.num_suffix, place + 1 - most_tokens)
            text = self._decode(sequence.own_tokens(first, place + 1).tolist())
            if any(stop in text for stop in request.stop):
                return "stop"
        return "length" if place + 1 - sequence.num_suffix == request.max_new_tokens else None
