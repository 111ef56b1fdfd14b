"""From a step's hidden states to tokens, and from an answered sequence to completions."""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from engine.device.transfers import HostCopies, to_device
from engine.execution.sampler import LabelRows, sample
from engine.model.model import Model
from engine.request import Completion, FinishReason, Mode, Request
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import Answered, Step, StepTokens

if TYPE_CHECKING:
    from engine.pooling.pooler import Pooler

Decoder = Callable[[Sequences[int]], str]
"""The caller's detokenizer: token ids to text."""


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """What the model says in one step; the device may still be computing it.

    Args:
        step: whose rows these are.
        token_ids: int64 ``[n]`` on the device, one token for each row of `Step.sampled`.
        labels: the rows that score labels.
        copies: token_ids and the labels' scores, on their way to the host.
        follow: what is known with a token, given its sequence and place: tokens that follow for certain, why it ends.
        watched_rows, eos_token_ids: `follow` is asked about these rows, and about these tokens in any row.
    """

    step: Step
    token_ids: torch.Tensor
    labels: LabelRows
    copies: HostCopies
    follow: Callable[[Sequence, int, int], tuple[Sequences[int], FinishReason | None]]
    watched_rows: frozenset[int]
    eos_token_ids: frozenset[int]

    def wait(self) -> StepTokens:
        """Waits for the device; label scores are added to their sequences.

        Steps are waited for in the order in which they were launched, each before the next but one is.
        """
        copied, *scores = self.copies.wait()
        self.labels.book(scores)
        token_ids = copied.tolist()
        ends = {row for row, token in enumerate(token_ids) if token in self.eos_token_ids}
        return StepTokens(
            token_ids=token_ids,
            watched_rows=self.watched_rows | ends,
            follow=lambda row: self.follow(*self.step.sampled[row], token_ids[row]),
        )


class TokenSampler:
    """Samples and scores the output rows of steps.

    Args:
        model: its output layer makes logits of hidden states.
        decode: detokenizer for stop strings; None where no request has one.
    """

    def __init__(self, model: Model, decode: Decoder | None) -> None:
        self._model = model
        self._decode = decode

    def sample(self, hidden: torch.Tensor, step: Step) -> PendingTokens:
        """Launches sampling and scoring on the device; changes no sequence.

        Args:
            hidden: ``[R, hidden]``, last hidden states of the output rows of the step.
            step: not committed yet.
        """
        requests = [sequence.request for sequence, _ in step.sampled]
        positions = [place - sequence.num_suffix for sequence, place in step.sampled]
        labels, scores, sampled = LabelRows(()), list[torch.Tensor](), hidden
        if len(step.sampled) < step.num_output_rows:
            labels = LabelRows(rows for rows in step.scored_rows if rows[0].request.mode == "score")
            scores = labels.score(hidden, self._model)
            scored = [first + index for _, first, num_rows, _ in step.scored_rows for index in range(num_rows)]
            rows = np.delete(np.arange(step.num_output_rows), scored)
            sampled = hidden.index_select(0, to_device(rows, hidden.device))
        token_ids = sample(sampled, self._model, requests, positions, self._masks(step))
        watched = frozenset(row for row, request in enumerate(requests) if request.stop or request.is_constrained)
        copies, eos = HostCopies([token_ids, *scores]), self._model.eos_token_ids
        return PendingTokens(step, token_ids, labels, copies, self._follow, watched, eos)

    def prepare(self, step: Step) -> None:
        """Starts what `sample` needs besides hidden states; called before the step is launched, where it can be."""

    def needs_tokens(self, step: Step) -> bool:
        """Whether the step can be sampled only after the step before it is committed."""
        return False

    def count_allowed(self, sequence: Sequence, token_ids: npt.NDArray[np.int32]) -> int:
        """How many of the tokens, from the first on, a constrained answer may go on with.

        Args:
            sequence: whose tokens are known all.
            token_ids: int32 ``[n]``, guesses at the next ones.
        """
        return len(token_ids)

    def _masks(self, step: Step) -> torch.Tensor | None:
        """The tokens allowed in each sampled row, see `sample`; None: all."""
        return None

    def _follow(self, sequence: Sequence, place: int, token: int) -> tuple[Sequences[int], FinishReason | None]:
        """What is known with `token` as own token `place`, see `PendingTokens`."""
        return (), self._find_end(sequence, place, token, sequence.num_suffix)

    def _find_end(self, sequence: Sequence, place: int, token: int, start: int) -> FinishReason | None:
        """Why an answer that begins with own token `start` ends with `token`, if it does before its longest length."""
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


def complete(answered: Answered, requests: Sequences[Request], compute_ms: float) -> Iterator[Completion]:
    """The completion of each request that owns an answered sequence.

    Args:
        answered: the sequence, and why it ended.
        requests: of the run; the sequence's owners are indices into these.
        compute_ms: cost of the answer, which the first owner pays.
    """
    sequence, reason = answered.sequence, answered.reason
    token_ids: tuple[int, ...] = ()
    thoughts: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    error = None
    if reason == "error":
        error = sequence.error or (
            f"KV memory ran out when {sequence.num_output_tokens} tokens of the answer had been generated, "
            "and preemption 'kill' ends the request admitted last"
        )
    elif sequence.vector is not None:
        from engine.execution.pooled_output import complete_pooled  # few runs have any

        yield from complete_pooled(sequence, requests, compute_ms)
        return
    elif reason == "scored":
        scores = sequence.label_scores
        logprobs = tuple((scores - np.logaddexp.reduce(scores)).tolist())
    else:
        token_ids = tuple(sequence.output_token_ids)
        if sequence.request.thinking is not None:
            thoughts, token_ids = sequence.request.thinking.split(token_ids)
    for index, owner in enumerate(sequence.owners):
        request = requests[owner]
        num_prompt_tokens = len(request.token_ids)
        num_cached = sequence.num_cached_tokens if index == 0 else num_prompt_tokens
        yield Completion(
            request_id=request.request_id,
            finish_reason=reason,
            token_ids=token_ids,
            thinking_token_ids=thoughts,
            label_logprobs=logprobs,
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=0 if reason == "error" else num_cached,
            num_output_tokens=0 if reason == "error" else sequence.num_output_tokens,
            compute_ms=compute_ms if index == 0 else 0.0,
            error=error,
        )


def make_sampler(
    model: Model,
    requests: Iterable[Request],
    decode: Decoder | None,
    poolers: "dict[Mode, Pooler]",
    checkpoint: str | None,
) -> TokenSampler:
    """What makes answers of a run's hidden states.

    Args:
        model: its output layer makes logits of hidden states.
        requests: of the run.
        decode: detokenizer for stop strings; None where no request has one.
        poolers: found before, by mode; those that the run needs are added.
        checkpoint: as `Engine.load` was given it; None for a loaded model.
    Raises:
        ModelError: the checkpoint has no embeddings or classes, or pools other tokens than the last.
    """
    pooled_modes = {request.mode for request in requests if request.is_pooled}
    has_constraints = any(request.is_constrained for request in requests)
    if not pooled_modes and not has_constraints:
        return TokenSampler(model, decode)
    from engine.execution.constrained_sampler import ConstrainedSampler  # few runs have such requests

    if not pooled_modes:
        return ConstrainedSampler(model, decode)
    from engine.execution.pooled_output import ConstrainedPoolingSampler, find_poolers

    find_poolers(pooled_modes, poolers, checkpoint, model.device)
    return ConstrainedPoolingSampler(model, decode, poolers)
