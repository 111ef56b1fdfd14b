"""Runs with prompts that are answered by their hidden states: a step's pooled rows beside the sampled ones."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Sequences
from dataclasses import dataclass

import torch

from engine.device.transfers import HostCopies
from engine.execution.constrained_sampler import ConstrainedSampler
from engine.execution.output import Decoder, PendingTokens, TokenSampler
from engine.model.checkpoint import resolve_checkpoint
from engine.model.model import Model
from engine.pooling.pooled_rows import PooledRows, pooled_answer
from engine.pooling.pooler import Pooler, causal_pooler
from engine.request import Completion, Mode, Request
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import Step, StepTokens


@dataclass(frozen=True, slots=True)
class PendingVectors(PendingTokens):
    """As `PendingTokens`, with the pooled rows of the step.

    Args:
        pooled: the rows that are answered by themselves.
        vectors: what is made of them, on its way to the host.
    """

    pooled: PooledRows
    vectors: HostCopies

    def wait(self) -> StepTokens:
        """Waits for the device; vectors, like scores, are handed to their sequences."""
        self.pooled.book(self.vectors.wait())
        return PendingTokens.wait(self)


class PoolingSampler(TokenSampler):
    """Samples, scores and pools the output rows of steps.

    Args:
        model: its output layer makes logits of hidden states.
        decode: detokenizer for stop strings; None where no request has one.
        poolers: for each mode of the run that is answered by hidden states.
    """

    def __init__(self, model: Model, decode: Decoder | None, poolers: Mapping[Mode, Pooler]) -> None:
        super().__init__(model, decode)
        self._poolers = poolers

    def sample(self, hidden: torch.Tensor, step: Step) -> PendingTokens:
        """See `TokenSampler.sample`."""
        made = super().sample(hidden, step)
        rows = [(sequence, row) for sequence, row, _, _ in step.scored_rows if sequence.request.is_pooled]
        if not rows:
            return made
        pooled = PooledRows(rows, self._poolers)
        vectors = HostCopies(pooled.score(hidden))
        return PendingVectors(
            made.step, made.token_ids, made.labels, made.copies, made.follow, made.watched_rows, made.eos_token_ids,
            pooled, vectors,
        )  # fmt: skip


class ConstrainedPoolingSampler(PoolingSampler, ConstrainedSampler):
    """Of runs with such prompts, in which other requests may have grammars."""


def complete_pooled(sequence: Sequence, requests: Sequences[Request], compute_ms: float) -> Iterator[Completion]:
    """The completion of each request that owns a sequence whose vector is known.

    Args:
        sequence: answered; its owners are indices into `requests`.
        requests: of the run.
        compute_ms: cost of the answer, which the first owner pays.
    """
    assert sequence.vector is not None, "a sequence is answered by its vector"
    answer, num_tokens = pooled_answer(sequence.request, sequence.vector), len(sequence.request.token_ids)
    for index, owner in enumerate(sequence.owners):
        yield Completion(
            request_id=requests[owner].request_id,
            finish_reason="embedded" if sequence.request.mode == "embed" else "scored",
            num_prompt_tokens=num_tokens,
            num_cached_tokens=sequence.num_cached_tokens if index == 0 else num_tokens,
            compute_ms=compute_ms if index == 0 else 0.0,
            **answer,
        )


def find_poolers(modes: set[Mode], poolers: dict[Mode, Pooler], checkpoint: str | None, device: torch.device) -> None:
    """Adds to `poolers` what answers of these modes need.

    Args:
        modes: of the requests.
        poolers: those that were found before.
        checkpoint: as `Engine.load` was given it; None for a loaded model.
        device: of the hidden states.
    Raises:
        ModelError: the checkpoint has no such answers, or pools other tokens than the last.
    """
    folder = None if checkpoint is None else resolve_checkpoint(checkpoint)
    for mode in modes - poolers.keys():
        poolers[mode] = causal_pooler(folder, mode, device)
