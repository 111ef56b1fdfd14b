"""From a step's hidden states to answers: sampling, the end of an answer, label scores."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Sequences

import numpy as np
import torch

from engine.model import Model
from engine.request import Completion, FinishReason, Request
from engine.sampler import sample
from engine.scheduler import Scheduler
from engine.sequence import Sequence

Decoder = Callable[[Sequences[int]], str]
"""The caller's detokenizer: token ids to text."""

_ROWS_AT_ONCE = 256
"""Rows that go through the output layer together: a bound on the memory of logits."""


class OutputProcessor:
    """Gives each output row to its sequence, and each finished sequence to the requests that own it."""

    def __init__(
        self, requests: Sequences[Request], model: Model, scheduler: Scheduler, decode: Decoder | None
    ) -> None:
        self._requests = requests
        self._model = model
        self._scheduler = scheduler
        self._decode = decode
        self._label_columns: dict[tuple[tuple[int, ...], ...], torch.Tensor] = {}

    def process(
        self, hidden: torch.Tensor, outputs: Sequences[tuple[Sequence, int]]
    ) -> Iterator[tuple[Sequence, FinishReason]]:
        """Books what the model said; yields what is answered by it and why it ended, its memory freed.

        Args:
            hidden: ``[R, hidden]``, last hidden states of the output rows.
            outputs: whose rows they are, (sequence, number of rows) in row order; R rows in all.
        """
        starts = np.cumsum([0, *(count for _, count in outputs)]).tolist()
        sampled = [(s, row) for (s, _), row in zip(outputs, starts, strict=False) if s.request.mode == "generate"]
        for first in range(0, len(sampled), _ROWS_AT_ONCE):
            yield from self._sample(hidden, sampled[first : first + _ROWS_AT_ONCE])
        for (sequence, count), row in zip(outputs, starts, strict=False):
            if sequence.request.mode == "score":
                yield from self._score(sequence, hidden[row : row + count])

    def complete(self, sequence: Sequence, reason: FinishReason, compute_ms: float) -> Iterator[Completion]:
        """The answer of each request that owns a finished sequence; only the first one paid for it."""
        token_ids = tuple(sequence.output_token_ids)
        sums = sequence.label_sums
        logprobs = tuple((sums - np.logaddexp.reduce(sums)).tolist()) if reason == "scored" else ()
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

    def _sample(
        self, hidden: torch.Tensor, rows: Sequences[tuple[Sequence, int]]
    ) -> Iterator[tuple[Sequence, FinishReason]]:
        sequences = [sequence for sequence, _ in rows]
        logits = self._model.logits(hidden[[row for _, row in rows]])
        tokens = sample(logits, [s.request for s in sequences], [s.num_output_tokens for s in sequences])
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.append(token)
            reason = self._finish_reason(sequence, token)
            if reason is None:
                self._scheduler.continue_decoding(sequence)
            else:
                self._scheduler.finish(sequence)
                yield sequence, reason

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        request = sequence.request
        if token in self._model.eos_token_ids and not request.ignore_eos:
            return "eos"
        if request.stop and self._decode is not None:
            # A token adds at least a byte of text, so a stop string that just ended began within this many tokens.
            most_tokens = max(len(text.encode()) for text in request.stop) + 4
            text = self._decode(sequence.output_token_ids[-most_tokens:])
            if any(stop in text for stop in request.stop):
                return "stop"
        return "length" if sequence.num_output_tokens == request.max_new_tokens else None

    def _score(self, sequence: Sequence, hidden: torch.Tensor) -> Iterator[tuple[Sequence, FinishReason]]:
        """First the labels' first tokens, from the prompt's last row; then the rest of each longer label in turn.

        The first tokens need only their own columns of the output layer: what normalises a row is common to all labels.
        """
        labels = sequence.request.labels
        if sequence.num_computed == sequence.num_suffix:
            if sequence.label < 0:
                columns = self._label_columns.get(labels)
                if columns is None:
                    columns = torch.tensor([label[0] for label in labels], device=hidden.device)
                    self._label_columns[labels] = columns
                sequence.first_scores[:] = self._model.label_logits(hidden[-1:], columns)[0].tolist()
                sequence.label_sums[:] = sequence.first_scores
            next_label = max(sequence.label, 0)
        else:
            label = labels[sequence.label]
            last = sequence.num_computed - sequence.num_suffix
            targets = torch.tensor(label[last - len(hidden) + 1 : last + 1], device=hidden.device)
            logprobs = self._model.logits(hidden).log_softmax(dim=-1).gather(1, targets.unsqueeze(1))
            sequence.label_sums[sequence.label] += float(logprobs.double().sum())
            if last < len(label) - 1:
                return
            next_label = sequence.label + 1
        longer = (index for index in range(next_label, len(labels)) if len(labels[index]) > 1)
        index = next(longer, None)
        if index is None:
            sequence.length = sequence.num_suffix
            self._scheduler.finish(sequence)
            yield sequence, "scored"
        else:
            sequence.start_label(index)
            self._scheduler.continue_decoding(sequence)
