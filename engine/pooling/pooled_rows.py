"""The rows of a step whose hidden states are the answers of their prompts, and these answers."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.device.transfers import to_device
from engine.pooling.pooler import Pooler
from engine.request import Mode, Request
from engine.scheduling.sequence import Sequence

Vector = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Rows of one step, each the last row of a prompt, as (sequence, row); the poolers by mode make a vector of a
    row."""

    rows: Sequences[tuple[Sequence, int]]
    poolers: Mapping[Mode, Pooler]

    def score(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Launches the pooling of the step's output rows; `book` takes the result once it is on the host."""
        vectors = []
        for mode, rows in self._by_mode():
            index = to_device(np.array([row for _, row in rows], dtype=np.int64), hidden.device)
            lengths = torch.ones(len(rows), dtype=torch.int64, device=hidden.device)
            vectors.append(self.poolers[mode](hidden.index_select(0, index), lengths))
        return vectors

    def book(self, vectors: Sequences[torch.Tensor]) -> None:
        """Sets the vectors of the sequences."""
        for (_, rows), found in zip(self._by_mode(), vectors, strict=True):
            for (sequence, _), vector in zip(rows, found.numpy(), strict=True):
                sequence.vector = vector

    def _by_mode(self) -> Iterable[tuple[Mode, list[tuple[Sequence, int]]]]:
        for mode in self.poolers:
            rows = [(sequence, row) for sequence, row in self.rows if sequence.request.mode == mode]
            if rows:
                yield mode, rows


def pooled_answer(request: Request, vector: Vector) -> dict[str, Any]:
    """The fields of a `Completion` that hold the answer to an embed or classify request, from the vector ``[n]`` of a
    `Pooler`."""
    if request.mode == "embed":
        wanted = vector[: request.dimensions].astype(np.float32)
        return {"embedding": wanted / max(float(np.linalg.norm(wanted)), 1e-12) if request.normalize else wanted}
    return {"label_logprobs": tuple(vector.tolist())}
