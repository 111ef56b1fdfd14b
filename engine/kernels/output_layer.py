"""What the output layers of all backends have in common."""

import torch

ROWS_AT_ONCE = 256
"""Rows whose logits are written together: a bound on their memory."""


def columns_in_float64(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A few columns of an output layer: float64 ``[R, n]``.

    In 16 bits many rows would tie. Rounded to float32, a row is the same whatever other rows it is computed with.

    Args:
        hidden: ``[R, hidden]``.
        weight: ``[n, hidden]``.
        bias: ``[n]``.
    """
    return torch.nn.functional.linear(hidden.double(), weight.double(), None if bias is None else bias.double())


def mask_logits(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """``[R, vocab_size]`` with -inf for each token that is not allowed, see `OutputLayer.most_likely`."""
    bits = allowed.view(torch.uint8).unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=allowed.device) & 1
    return logits.masked_fill(bits.flatten(1)[:, : logits.shape[-1]] == 0, -torch.inf)
