"""The output layer computed by torch, for attention backends without one."""

from collections.abc import Callable

import torch
from torch import nn

from engine.kernels.output_layer import ROWS_AT_ONCE, columns_in_float64


class TorchOutputLayer:
    """The checkpoint's own output layer (`engine.kernels.attention_backend.OutputLayer`)."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear = linear

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(hidden)
        return logits

    def most_likely(self, hidden: torch.Tensor, allowed: torch.Tensor | None = None) -> torch.Tensor:
        return largest_logits(hidden, self.logits, allowed)

    def label_logits(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        bias = None if self.linear.bias is None else self.linear.bias[token_ids]
        return columns_in_float64(hidden, self.weights_of(token_ids), bias)

    def weights_of(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.linear.weight[token_ids]


def largest_logits(
    hidden: torch.Tensor, logits_of: Callable[[torch.Tensor], torch.Tensor], allowed: torch.Tensor | None
) -> torch.Tensor:
    """`OutputLayer.most_likely` that computes the logits of a few rows at a time: `logits_of` maps ``[n, hidden]`` to
    ``[n, vocab_size]``. See `OutputLayer.most_likely`."""
    chosen = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
    for first in range(0, len(hidden), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        logits = logits_of(hidden[rows]).float()
        chosen[rows] = (logits if allowed is None else mask_logits(logits, allowed[rows])).argmax(dim=-1)
    return chosen


def mask_logits(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """``[R, vocab_size]`` with -inf for each token that `allowed` forbids (see `OutputLayer.most_likely`)."""
    bits = allowed.view(torch.uint8).unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=allowed.device) & 1
    return logits.masked_fill(bits.flatten(1)[:, : logits.shape[-1]] == 0, -torch.inf)
