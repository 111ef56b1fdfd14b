"""Random draws of tokens in plain torch: the reference for the kernels."""

import torch

_ROWS_AT_ONCE = 64
"""Rows that are sorted, in float64, at the same time."""


def draw_tokens(logits: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
    """Draws one token per row, after temperature, top-k and top-p: int64 ``[R]``.

    Top-k, then top-p, keep the most likely tokens, the lower ids on ties. The drawn token is the first, by ascending
    id, at which the cumulative probability of the kept tokens exceeds the row's uniform number.

    Args:
        logits: float32 ``[R, vocab_size]``; a token of -inf is never drawn.
        settings: float64 ``[R, 4]``: temperature above 0; top-k, or vocab_size; top-p, or 1; uniform number in [0, 1).
    """
    pieces = [slice(first, first + _ROWS_AT_ONCE) for first in range(0, len(logits), _ROWS_AT_ONCE)]
    return torch.cat([_draw(logits[piece], settings[piece]) for piece in pieces])


def _draw(logits: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
    temperature, top_k, top_p, uniform = (settings[:, column : column + 1] for column in range(4))
    scaled, order = (logits.double() / temperature).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    probabilities = scaled.masked_fill(rank >= top_k, -torch.inf).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    is_cut = (before >= top_p) & (rank > 0)
    by_id = torch.zeros_like(probabilities).scatter_(1, order, probabilities.masked_fill(is_cut, 0.0))
    cumulative = by_id.cumsum(dim=-1)
    drawn: torch.Tensor = (cumulative <= uniform * cumulative[:, -1:]).sum(dim=-1)
    return drawn
