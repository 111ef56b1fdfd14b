"""The output rows of a step that generate nothing: rows that score labels, and pooled prompts.

The first tokens of all labels are scored from the prompt's last row, then the other tokens of each label in turn. First
tokens need only their own columns of the output layer: the row's normaliser is the same for all labels and cancels out.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Sequences
from functools import partial

import numpy as np
import torch

from engine.device.transfers import to_device
from engine.kernels.output_layer import ROWS_AT_ONCE
from engine.model.model import Model
from engine.pooling.pooler import Pooler
from engine.request import Mode
from engine.scheduling.sequence import Sequence

Row = tuple[Sequence, int]
"""A sequence, and the index of its output row."""

Tail = tuple[Sequence, int, int, tuple[int, ...]]
"""A sequence, one of its labels, a row, and the tokens of the label that this row and those after it predict."""

Book = Callable[[torch.Tensor], None]
"""Adds a result to its sequences, once it is in host memory."""


def score_rows(
    rows: Iterable[tuple[Sequence, int, int, int]], hidden: torch.Tensor, model: Model, poolers: Mapping[Mode, Pooler]
) -> list[tuple[torch.Tensor, Book]]:
    """Launches the scoring of labels and the pooling of prompts in `Step.scored_rows`; returns the results on the
    device. `hidden`, ``[R, hidden]``, is of all the step's output rows. See `TokenSampler`."""
    firsts: dict[tuple[tuple[int, ...], ...], list[Row]] = {}
    tails: list[Tail] = []
    pooled: dict[Mode, list[Row]] = {}
    for sequence, row, num_rows, place in rows:
        request, first = sequence.request, place - sequence.num_suffix
        if request.is_pooled:
            pooled.setdefault(request.mode, []).append((sequence, row))
        elif first > 0:
            targets = request.labels[sequence.label][first : first + num_rows]
            tails.append((sequence, sequence.label, row, targets))
        elif sequence.label < 0:  # else the prompt is recomputed after a preemption, and its scores are known
            firsts.setdefault(request.labels, []).append((sequence, row))
    results: list[tuple[torch.Tensor, Book]] = []
    for labels, same in firsts.items():
        columns = to_device(np.array([label[0] for label in labels], dtype=np.int64), hidden.device)
        results.append((model.label_logits(_take(hidden, same), columns), partial(_book_firsts, same)))
    if tails:
        results.append((_score_tails(tails, hidden, model), partial(_book_tails, tails)))
    for mode, same in pooled.items():
        lengths = torch.ones(len(same), dtype=torch.int64, device=hidden.device)
        results.append((poolers[mode](_take(hidden, same), lengths), partial(_book_vectors, same)))
    return results


def _take(hidden: torch.Tensor, rows: Sequences[Row]) -> torch.Tensor:
    return hidden.index_select(0, to_device(np.array([row for _, row in rows], dtype=np.int64), hidden.device))


def _score_tails(tails: Sequences[Tail], hidden: torch.Tensor, model: Model) -> torch.Tensor:
    """The natural-log probability of each target, in the order of the tails."""
    pairs = np.array([(row + i, token) for _, _, row, targets in tails for i, token in enumerate(targets)], np.int64)
    pieces = []
    for first in range(0, len(pairs), ROWS_AT_ONCE):
        rows, targets = to_device(pairs[first : first + ROWS_AT_ONCE].T.copy(), hidden.device)
        logprobs = model.logits(hidden.index_select(0, rows)).log_softmax(dim=-1)
        pieces.append(logprobs.gather(1, targets.unsqueeze(1)).squeeze(1))
    return torch.cat(pieces)


def _book_firsts(rows: Sequences[Row], scores: torch.Tensor) -> None:
    for (sequence, _), row in zip(rows, scores.tolist(), strict=True):
        sequence.first_scores[:] = row


def _book_tails(tails: Sequences[Tail], logprobs: torch.Tensor) -> None:
    wide, last = logprobs.double().numpy(), 0
    for sequence, label, _, targets in tails:
        first, last = last, last + len(targets)
        sequence.tail_sums[label] += wide[first:last].sum()


def _book_vectors(rows: Sequences[Row], vectors: torch.Tensor) -> None:
    for (sequence, _), vector in zip(rows, vectors.numpy(), strict=True):
        sequence.vector = vector
