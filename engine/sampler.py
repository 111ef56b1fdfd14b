"""From logits to the next token: greedy, or a draw from the request's own random stream."""

from collections.abc import Sequence

import numpy as np
import torch

from engine.request import Request


def sample(logits: torch.Tensor, requests: Sequence[Request], positions: Sequence[int]) -> list[int]:
    """One token for each row.

    A draw depends on the row's logits, the request's seed and the position in its answer, on nothing else: not on the
    other rows, and not on how often the request was preempted.

    Args:
        logits: float32 ``[R, vocab_size]``.
        requests: whose rows these are, ``R`` of them.
        positions: number of tokens each answer has so far.
    Returns:
        R token ids.
    """
    chosen: list[int] = logits.argmax(dim=-1).tolist()
    drawn = [row for row, request in enumerate(requests) if request.temperature > 0]
    for first in range(0, len(drawn), 64):  # rows are sorted in float64: a bound on that memory
        rows = drawn[first : first + 64]
        tokens = _draw(logits[rows], [requests[row] for row in rows], [positions[row] for row in rows])
        for row, token in zip(rows, tokens, strict=True):
            chosen[row] = token
    return chosen


def _draw(logits: torch.Tensor, requests: Sequence[Request], positions: Sequence[int]) -> list[int]:
    """Inverse of the cumulative distribution over tokens by falling probability, cut by top-k and top-p."""

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device).unsqueeze(1)

    temperature = column([request.temperature for request in requests])
    scaled, order = (logits.double() / temperature).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    top_k = column([request.top_k or logits.shape[-1] for request in requests])
    probabilities = scaled.masked_fill(rank >= top_k, -torch.inf).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    top_p = column([request.top_p for request in requests])
    is_cut = (before >= top_p) & (rank > 0)
    cumulative = probabilities.masked_fill(is_cut, 0.0).cumsum(dim=-1)
    uniform = column([_uniform(request.seed, at) for request, at in zip(requests, positions, strict=True)])
    place = (cumulative <= uniform * cumulative[:, -1:]).sum(dim=-1, keepdim=True)
    chosen: list[int] = order.gather(1, place).squeeze(1).tolist()
    return chosen


def _uniform(seed: int, position: int) -> float:
    """The position-th number in [0, 1) of a seed's stream; counter-based, so any position can be drawn first."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())
