"""Runs with requests of mode "embed" or "classify": pooled rows besides the sampled and scored ones."""

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
from engine.pooling.pooler import Pooler, causal_pooler, why_too_many
from engine.request import Mode, Request
from engine.scheduling.step import Step, StepTokens


@dataclass(frozen=True, slots=True)
class PendingVectors(PendingTokens):
    """As `PendingTokens`, with the pooled rows of the step and their vectors, which are being copied to the host."""

    pooled: PooledRows
    vectors: HostCopies

    def wait(self) -> StepTokens:
        """Waits for the device; vectors and scores are added to their sequences."""
        self.pooled.book(self.vectors.wait())
        return PendingTokens.wait(self)


class PoolingSampler(TokenSampler):
    """Samples, scores and pools the output rows of steps: a `TokenSampler` with a pooler for each pooled mode of the
    run."""

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
    """For runs with pooled requests, in which other requests may be constrained."""


def make_sampler(
    model: Model,
    requests: Sequences[Request],
    decode: Decoder | None,
    poolers: dict[Mode, Pooler],
    checkpoint: str | None,
) -> TokenSampler:
    """The sampler of a run in which some requests are pooled or constrained.

    Args:
        decode: detokenizer for stop strings; None where no request has stop strings.
        poolers: of earlier runs, by mode; those that this run needs are added.
        checkpoint: the argument of `Engine.load`; None for a loaded model.
    Raises:
        ModelError: the checkpoint has no layer for the mode, or pools other tokens than the last.
    """
    modes = {request.mode for request in requests if request.is_pooled}
    if not modes:
        return ConstrainedSampler(model, decode)
    for mode in modes:
        find_pooler(model, mode, poolers, checkpoint)
    return ConstrainedPoolingSampler(model, decode, poolers)


def why_too_long(request: Request, model: Model, poolers: dict[Mode, Pooler], checkpoint: str | None) -> str | None:
    """Why a request of mode "embed" asks for too many dimensions; None where it does not. See `make_sampler`."""
    return why_too_many(request, find_pooler(model, "embed", poolers, checkpoint))


def find_pooler(model: Model, mode: Mode, poolers: dict[Mode, Pooler], checkpoint: str | None) -> Pooler:
    """The pooler of a mode, which is added to `poolers`. See `make_sampler`."""
    if mode not in poolers:
        folder = None if checkpoint is None else resolve_checkpoint(checkpoint)
        poolers[mode] = causal_pooler(folder, mode, model.device, model.hidden_size)
    return poolers[mode]
