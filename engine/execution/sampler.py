"""From logits to the next token: greedy, or a draw from the request's own random stream."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from engine.device.transfers import to_device
from engine.request import Request

ROWS_AT_ONCE = 256
"""Rows that go through the output layer together: a bound on the memory of logits."""

_DRAWN_AT_ONCE = 64
"""Rows that are drawn together: they are sorted in float64, a bound on that memory."""


class OutputLayer(Protocol):
    """What turns last hidden states ``[R, hidden]`` into logits."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 ``[R, vocab_size]``."""
        ...

    def most_likely(self, hidden: torch.Tensor) -> torch.Tensor:
        """int64 ``[R]``, the token of the largest logit, the first of equals."""
        ...


def sample(
    hidden: torch.Tensor, output_layer: OutputLayer, requests: Sequence[Request], positions: Sequence[int]
) -> torch.Tensor:
    """One token for each row, chosen on the device that the rows are on.

    A draw depends on the row's logits, the request's seed and the position in its answer, on nothing else: not on the
    other rows, and not on how often the request was preempted. Greedy rows need no logits, only which is the largest.

    Args:
        hidden: ``[R, hidden]`` last hidden states.
        requests: whose rows these are, ``R`` of them.
        positions: number of tokens each answer has so far.
    Returns:
        int64 ``[R]`` token ids.
    """
    drawn = [row for row, request in enumerate(requests) if request.temperature > 0]
    greedy = [row for row, request in enumerate(requests) if request.temperature == 0]
    chosen = torch.empty(len(requests), dtype=torch.int64, device=hidden.device)
    for first in range(0, len(greedy), ROWS_AT_ONCE):
        index = to_device(np.array(greedy[first : first + ROWS_AT_ONCE], dtype=np.int64), hidden.device)
        chosen.index_copy_(0, index, output_layer.most_likely(hidden.index_select(0, index)))
    for first in range(0, len(drawn), _DRAWN_AT_ONCE):
        rows = drawn[first : first + _DRAWN_AT_ONCE]
        index = to_device(np.array(rows, dtype=np.int64), hidden.device)
        logits = output_layer.logits(hidden.index_select(0, index))
        settings = np.array([_settings(requests[row], positions[row], logits.shape[-1]) for row in rows])
        chosen.index_copy_(0, index, _draw(logits, to_device(settings, logits.device)))
    return chosen


def _settings(request: Request, position: int, vocab_size: int) -> tuple[float, float, float, float]:
    """What a draw needs besides its logits; the number comes from the host, so that devices do not differ in it."""
    return request.temperature, request.top_k or vocab_size, request.top_p, _uniform(request.seed, position)


def _draw(logits: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
    """Inverse of the cumulative distribution over tokens by falling probability, cut by top-k and top-p.

    Args:
        settings: float64 ``[R, 4]``: temperature, top-k, top-p, a number in [0, 1).
    """
    temperature, top_k, top_p, uniform = (settings[:, column : column + 1] for column in range(4))
    scaled, order = (logits.double() / temperature).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    probabilities = scaled.masked_fill(rank >= top_k, -torch.inf).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    is_cut = (before >= top_p) & (rank > 0)
    cumulative = probabilities.masked_fill(is_cut, 0.0).cumsum(dim=-1)
    place = (cumulative <= uniform * cumulative[:, -1:]).sum(dim=-1, keepdim=True)
    drawn: torch.Tensor = order.gather(1, place).squeeze(1)
    return drawn


def _uniform(seed: int, position: int) -> float:
    """The position-th number in [0, 1) of a seed's stream; counter-based, so any position can be drawn first."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())
