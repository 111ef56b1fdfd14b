"""Runs with prompts that are answered by their hidden states: a step's pooled rows beside the sampled ones."""

from collections.abc import Mapping
from collections.abc import Sequence as Sequences
from dataclasses import dataclass

import torch

from engine.device.transfers import HostCopies
from engine.execution.constrained_sampler import ConstrainedSampler
from engine.execution.output import Decoder, PendingTokens, TokenSampler
from engine.model.loading.checkpoint import resolve_checkpoint
from engine.model.model import Model
from engine.pooling.pooled_rows import PooledRows
from engine.pooling.pooler import Pooler, causal_pooler
from engine.request import Mode, Request
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
        return PendingVectors(made.step, made.token_ids, made.labels, made.copies, made.sampler, pooled, vectors)


class ConstrainedPoolingSampler(PoolingSampler, ConstrainedSampler):
    """Of runs with such prompts, in which other requests may have grammars."""


def make_sampler(
    model: Model,
    requests: Sequences[Request],
    decode: Decoder | None,
    poolers: dict[Mode, Pooler],
    checkpoint: str | None,
) -> TokenSampler:
    """Of a run in which requests are pooled, think or have grammars.

    Args:
        model: its output layer makes logits of hidden states.
        requests: of the run.
        decode: detokenizer for stop strings; None where no request has one.
        poolers: found before, by mode; those that the run needs are added.
        checkpoint: as `Engine.load` was given it; None for a loaded model.
    Raises:
        ModelError: the checkpoint has no such answers, or pools other tokens than the last.
    """
    modes = {request.mode for request in requests if request.is_pooled}
    if not modes:
        return ConstrainedSampler(model, decode)
    folder = None if checkpoint is None else resolve_checkpoint(checkpoint)
    for mode in modes - poolers.keys():
        poolers[mode] = causal_pooler(folder, mode, model.device)
    return ConstrainedPoolingSampler(model, decode, poolers)
