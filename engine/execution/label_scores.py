"""Rows that score labels: first all labels' first tokens, from the prompt's last row; then the rest of each in turn.

The first tokens need only their own columns of the output layer: what normalises a row is common to all labels.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass

import numpy as np
import torch

from engine.device.transfers import to_device
from engine.model.model import Model
from engine.scheduling.sequence import Sequence

Labels = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tail:
    """Rows [row, row + len(targets)) that predict the next tokens of a label."""

    sequence: Sequence
    label: int
    row: int
    targets: tuple[int, ...]


class LabelRows:
    """The scoring rows of one step."""

    __slots__ = ("_firsts", "_tails")

    def __init__(self, outputs: Iterable[tuple[Sequence, int, int, int]]) -> None:
        """Sorts the rows by what they predict.

        Args:
            outputs: `Step.outputs` of sequences that score.
        """
        self._firsts: dict[Labels, list[tuple[Sequence, int]]] = {}
        self._tails: list[_Tail] = []
        for sequence, row, num_rows, place in outputs:
            labels, first = sequence.request.labels, place - sequence.num_suffix
            if first > 0:
                targets = labels[sequence.label][first : first + num_rows]
                self._tails.append(_Tail(sequence=sequence, label=sequence.label, row=row, targets=targets))
            elif sequence.label < 0:  # else the prompt was computed again, and its scores are known
                self._firsts.setdefault(labels, []).append((sequence, row))

    def score(self, hidden: torch.Tensor, model: Model, rows_at_once: int) -> list[torch.Tensor]:
        """Launches the scoring; `book` is given the result once it is on the host.

        Args:
            hidden: ``[R, hidden]`` last hidden states of the step's output rows.
            model: whose output layer scores.
            rows_at_once: most rows that go through the whole output layer together.
        """
        scores = []
        for labels, firsts in self._firsts.items():
            index = to_device(np.array([row for _, row in firsts], dtype=np.int64), hidden.device)
            columns = to_device(np.array([label[0] for label in labels], dtype=np.int64), hidden.device)
            scores.append(model.label_logits(hidden.index_select(0, index), columns))
        if not self._tails:
            return scores
        rows = np.array([tail.row + i for tail in self._tails for i in range(len(tail.targets))], dtype=np.int64)
        targets = np.array([token for tail in self._tails for token in tail.targets], dtype=np.int64)
        for first in range(0, len(rows), rows_at_once):
            chosen = to_device(
                np.stack([array[first : first + rows_at_once] for array in (rows, targets)]), hidden.device
            )
            logprobs = model.logits(hidden.index_select(0, chosen[0])).log_softmax(dim=-1)
            scores.append(logprobs.gather(1, chosen[1].unsqueeze(1)).squeeze(1))
        return scores

    def book(self, scores: Sequences[torch.Tensor]) -> None:
        """Adds what `score` gave to the sequences."""
        for firsts, found in zip(self._firsts.values(), scores, strict=False):
            for (sequence, _), row in zip(firsts, found.tolist(), strict=True):
                sequence.first_scores[:] = row
        logprobs = np.concatenate([np.zeros(0), *(found.numpy() for found in scores[len(self._firsts) :])])
        last = 0
        for tail in self._tails:
            first, last = last, last + len(tail.targets)
            tail.sequence.tail_sums[tail.label] += logprobs[first:last].sum()
