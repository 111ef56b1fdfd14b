"""Rows that score labels: first all labels' first tokens, from the prompt's last row; then the rest of each in turn.

The first tokens need only their own columns of the output layer: what normalises a row is common to all labels.
"""

from collections.abc import Iterator
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelRows:
    """The scoring rows of one step.

    Attributes:
        firsts: by labels, the sequences that have their first tokens scored, each with its row.
        tails: rows of labels of several tokens.
        computed: sequences whose prompt, or label, is computed whole by this step; with them, in the same order, the
            label that each goes on with, -1 where all are scored.
    """

    firsts: dict[Labels, list[tuple[Sequence, int]]]
    tails: list[_Tail]
    computed: list[tuple[Sequence, int]]

    @classmethod
    def of(cls, owners: Sequences[tuple[Sequence, int, int]]) -> "LabelRows":
        """Sorts out (sequence, first row, number of rows), their step booked as computed."""
        rows = cls(firsts={}, tails=[], computed=[])
        for sequence, row, count in owners:
            labels = sequence.request.labels
            if sequence.num_computed == sequence.num_suffix:
                if sequence.label < 0:
                    rows.firsts.setdefault(labels, []).append((sequence, row + count - 1))
            else:
                label = labels[sequence.label]
                last = sequence.num_computed - sequence.num_suffix
                targets = label[last - count + 1 : last + 1]
                rows.tails.append(_Tail(sequence=sequence, label=sequence.label, row=row, targets=targets))
                if last < len(label) - 1:
                    continue
            rows.computed.append((sequence, sequence.next_label))
        return rows

    def score(self, hidden: torch.Tensor, model: Model, rows_at_once: int) -> list[torch.Tensor]:
        """What `book` is given once it is on the host."""
        scores = []
        for labels, firsts in self.firsts.items():
            index = to_device(np.array([row for _, row in firsts], dtype=np.int64), hidden.device)
            columns = to_device(np.array([label[0] for label in labels], dtype=np.int64), hidden.device)
            scores.append(model.label_logits(hidden.index_select(0, index), columns))
        if not self.tails:
            return scores
        rows = np.array([tail.row + i for tail in self.tails for i in range(len(tail.targets))], dtype=np.int64)
        targets = np.array([token for tail in self.tails for token in tail.targets], dtype=np.int64)
        for first in range(0, len(rows), rows_at_once):
            chosen = to_device(
                np.stack([array[first : first + rows_at_once] for array in (rows, targets)]), hidden.device
            )
            logprobs = model.logits(hidden.index_select(0, chosen[0])).log_softmax(dim=-1)
            scores.append(logprobs.gather(1, chosen[1].unsqueeze(1)).squeeze(1))
        return scores

    def start_next(self) -> Iterator[Sequence]:
        """Goes on with the next label where there is one; gives the sequences that have more to compute."""
        for sequence, label in self.computed:
            if label >= 0:
                sequence.start_label(label)
                yield sequence

    def book(self, scores: Sequences[torch.Tensor]) -> Iterator[Sequence]:
        """Adds what `score` gave to the sequences; gives those that have all their labels scored."""
        for firsts, found in zip(self.firsts.values(), scores, strict=False):
            for (sequence, _), row in zip(firsts, found.tolist(), strict=True):
                sequence.first_scores[:] = row
        logprobs = np.concatenate([np.zeros(0), *(found.numpy() for found in scores[len(self.firsts) :])])
        last = 0
        for tail in self.tails:
            first, last = last, last + len(tail.targets)
            tail.sequence.tail_sums[tail.label] += logprobs[first:last].sum()
        for sequence, label in self.computed:
            if label < 0:
                yield sequence
