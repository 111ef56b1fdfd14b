"""Functions that the output layers of several backends share."""

import torch

ROWS_AT_ONCE = 256
"""Rows whose logits are in memory at the same time."""


def columns_in_float64(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Logits of a few tokens, ``[R, hidden]`` and weights ``[n, hidden]`` to float64 ``[R, n]``. See `OutputLayer`.

    In 16 bits many rows would tie. Rounded to float32, a row's logits do not depend on the other rows in the batch."""
    return torch.nn.functional.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
