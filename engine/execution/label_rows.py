"""From hidden states to label scores.

The first tokens of all labels are scored from the prompt's last row, then the other tokens of each label in turn. First
tokens need only their own columns of the output layer: the row's normaliser is the same for all labels and cancels out.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Sequences
from typing import NamedTuple

import numpy as np
import torch

from engine.device.transfers import to_device
from engine.kernels.output_layer import ROWS_AT_ONCE
from engine.model.model import Model
from engine.scheduling.sequence import Sequence

Labels = tuple[tuple[int, ...], ...]


class _Tail(NamedTuple):
    """Rows [row, row + len(targets)), which predict tokens of a label after its first."""

    sequence: Sequence
    label: int
    row: int
    targets: tuple[int, ...]


class LabelRows:
    """The scoring rows of one step."""

    __slots__ = ("_firsts", "_tails")

    def __init__(self, outputs: Iterable[tuple[Sequence, int, int, int]]) -> None:
        """Divides `Step.scored_rows`, without pooled ones, into rows of first tokens and rows of later tokens."""
        self._firsts: dict[Labels, list[tuple[Sequence, int]]] = {}
        self._tails: list[_Tail] = []
        for sequence, row, num_rows, place in outputs:
            labels, first = sequence.request.labels, place - sequence.num_suffix
            if first > 0:
                targets = labels[sequence.label][first : first + num_rows]
                self._tails.append(_Tail(sequence, sequence.label, row, targets))
            elif sequence.label < 0:  # else the prompt is recomputed after a preemption, and its scores are known
                self._firsts.setdefault(labels, []).append((sequence, row))

    def score(self, hidden: torch.Tensor, model: Model) -> list[torch.Tensor]:
        """Launches the scoring of the step's output rows; `book` takes the result once it is on the host."""
        scores = []
        for labels, firsts in self._firsts.items():
            index = to_device(np.array([row for _, row in firsts], dtype=np.int64), hidden.device)
            columns = to_device(np.array([label[0] for label in labels], dtype=np.int64), hidden.device)
            scores.append(model.label_logits(hidden.index_select(0, index), columns))
        tails = [(tail.row + i, token) for tail in self._tails for i, token in enumerate(tail.targets)]
        for first in range(0, len(tails), ROWS_AT_ONCE):
            pairs = np.array(tails[first : first + ROWS_AT_ONCE], dtype=np.int64)
            rows, targets = to_device(pairs.T.copy(), hidden.device)
            logprobs = model.logits(hidden.index_select(0, rows)).log_softmax(dim=-1)
            scores.append(logprobs.gather(1, targets.unsqueeze(1)).squeeze(1))
        return scores

    def book(self, scores: Sequences[torch.Tensor]) -> None:
        """Adds the scores to their sequences."""
        for firsts, found in zip(self._firsts.values(), scores, strict=False):
            for (sequence, _), row in zip(firsts, found.tolist(), strict=True):
                sequence.first_scores[:] = row
        logprobs = np.concatenate([np.zeros(0), *(found.numpy() for found in scores[len(self._firsts) :])])
        last = 0
        for tail in self._tails:
            first, last = last, last + len(tail.targets)
            tail.sequence.tail_sums[tail.label] += logprobs[first:last].sum()
