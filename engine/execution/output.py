"""From a step's hidden states to tokens, and from an answered sequence to completions."""

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.completion import Completion, FinishReason
from engine.device.transfers import HostCopies, to_device
from engine.errors import COMPUTED_NAN
from engine.execution.draws import sample
from engine.execution.scored_rows import Book, score_rows
from engine.model.model import Model
from engine.pooling.pooler import Pooler, pooled_answer
from engine.request import Mode, Request
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import Step

Decoder = Callable[[Sequences[int]], str]
"""The caller's detokenizer: token ids to text."""


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """The sampled tokens, label scores and pooled vectors of one step; the device may still be computing them.

    Args:
        token_ids: int64 ``[n]`` on the device, one token for each row of `Step.sampled`.
        copies: token_ids, the sum of the hidden states, and the results of `score_rows`, being copied to the host.
        books: of these results.
    """

    step: Step
    token_ids: torch.Tensor
    copies: HostCopies
    books: Sequences[Book]

    def wait(self) -> list[int]:
        """Waits for the device, adds scores and vectors to their sequences, and returns the tokens. To be called in the
        order of launches, and at the latest before the next but one step is launched. Raises `FloatingPointError`."""
        copied, checksum, *results = self.copies.wait()
        if checksum.isnan():
            raise FloatingPointError(COMPUTED_NAN)
        for book, result in zip(self.books, results, strict=True):
            book(result)
        return copied.tolist()


class TokenSampler:
    """Samples, scores and pools the output rows of steps. `decode` is the detokenizer for stop strings, None where no
    request has any; `poolers` has one for each pooled mode of the run."""

    def __init__(self, model: Model, decode: Decoder | None, poolers: Mapping[Mode, Pooler] | None = None) -> None:
        self._model = model
        self._decode = decode
        self._poolers = poolers or {}

    def sample(self, hidden: torch.Tensor, step: Step) -> PendingTokens:
        """Launches sampling, scoring and pooling of a step's output rows: ``[R, hidden]`` last hidden states."""
        results, sampled = list[tuple[torch.Tensor, Book]](), hidden
        if step.scored_rows:
            results = score_rows(step.scored_rows, hidden, self._model, self._poolers)
            scored = [first + index for _, first, num_rows, _ in step.scored_rows for index in range(num_rows)]
            rows = np.delete(np.arange(step.num_output_rows), scored)
            sampled = hidden.index_select(0, to_device(rows, hidden.device))
        masks = self._masks(step)
        if any(sequence.request.temperature or sequence.request.penalties for sequence, _ in step.sampled):
            token_ids = sample(sampled, self._model, step.sampled, masks)
        else:
            token_ids = self._model.most_likely(sampled, masks)
        copies = HostCopies([token_ids, hidden.sum(), *(result for result, _ in results)])
        return PendingTokens(step, token_ids, copies, [book for _, book in results])

    def prepare(self, step: Step) -> None:
        """Starts host work for `sample`; called before the step's launch where the tokens before it are known."""

    def needs_tokens(self, step: Step) -> bool:
        """Whether the step can be sampled only after the step before it is committed."""
        return any(sequence.request.penalties is not None for sequence, _ in step.sampled)

    def count_allowed(self, sequence: Sequence, token_ids: npt.NDArray[np.int32]) -> int:
        """How many of the guessed next tokens, int32 ``[n]``, from the first on, a constrained answer allows."""
        return len(token_ids)

    def _masks(self, step: Step) -> torch.Tensor | None:
        """The tokens allowed in each sampled row, see `OutputLayer.most_likely`; None: all."""
        return None

    def follow(self, sequence: Sequence, place: int, token: int) -> tuple[Sequences[int], FinishReason | None]:
        """What follows `token`, the `sequence`'s own one of index `place`. See `engine.scheduling.scheduler.Follow`."""
        may_end = sequence.is_watched or token in self._model.eos_token_ids
        return self._follow(sequence, place, token) if may_end else ((), None)

    def _follow(self, sequence: Sequence, place: int, token: int) -> tuple[Sequences[int], FinishReason | None]:
        """As `follow`, for a token that may end its answer or force others."""
        return (), self._find_end(sequence, place, token, sequence.num_suffix)

    def _find_end(self, sequence: Sequence, place: int, token: int, start: int) -> FinishReason | None:
        """Why an answer that begins at own token `start` ends with `token`, other than by its length; None if not."""
        request = sequence.request
        if token in self._model.eos_token_ids and not request.ignore_eos:
            return "eos"
        if request.stop and self._decode is not None:
            # A token adds at least a byte of text, so a stop string that just ended began within this many tokens.
            most_tokens = max(len(text.encode()) for text in request.stop) + 4
            first = max(start, place + 1 - most_tokens)
            text = self._decode([*sequence.own_token_ids[first:place].tolist(), token])
            if any(stop in text for stop in request.stop):
                return "stop"
        return None


def complete(sequence: Sequence, requests: Sequences[Request]) -> Iterator[Completion]:
    """The completions of an answered sequence's owners; the first one has its computed tokens and its time."""
    reason, request = sequence.finish_reason, sequence.request
    assert reason is not None
    answer: dict[str, Any] = {}
    if reason == "error":
        why = f"KV memory ran out when the answer had {sequence.num_output_tokens} tokens; preemption is 'kill'"
        answer["error"] = sequence.error or why
    elif sequence.vector is not None:
        reason = "embedded" if request.mode == "embed" else "scored"
        answer.update(pooled_answer(request, sequence.vector))
    elif reason == "scored":
        scores = sequence.first_scores + sequence.tail_sums  # up to a constant that all labels share
        if any(longer[: len(label)] == label for label, longer in pairwise(sorted(request.labels))):
            from engine.execution.nested_labels import set_apart  # imported only when needed

            scores = set_apart(scores, request.labels)
        answer["label_logprobs"] = tuple((scores - np.logaddexp.reduce(scores)).tolist())
    else:
        answer["num_output_tokens"] = sequence.num_output_tokens
        answer["token_ids"] = tuple(sequence.output_token_ids)
        if request.thinking is not None:
            answer["thinking_token_ids"], answer["token_ids"] = request.thinking.split(answer["token_ids"])
    for index, owner in enumerate(sequence.owners):
        num_prompt_tokens = len(request.token_ids)
        num_cached = sequence.num_cached_tokens if index == 0 else num_prompt_tokens
        yield Completion(
            request_id=requests[owner].request_id,
            finish_reason=reason,
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=0 if reason == "error" else num_cached,
            compute_ms=sequence.compute_ms if index == 0 else 0.0,
            **answer,
        )
