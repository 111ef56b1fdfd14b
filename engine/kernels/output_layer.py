"""The output layer of a model: what every implementation offers, and what they share."""

from typing import Protocol

import torch


class OutputLayer(Protocol):
    """The linear layer from hidden states ``[R, hidden]`` to the vocabulary."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[R, vocab_size]`` in the dtype of the weights, in int8 in float32."""

    def most_likely(self, hidden: torch.Tensor, allowed: torch.Tensor | None = None) -> torch.Tensor:
        """int64 ``[R]``: the token of the largest logit, the first of equals.

        Args:
            allowed: int32 ``[R, ceil(vocab_size / 32)]``: token t may be chosen where bit t % 32 of word t // 32 is
                set; each row has such a token. None: any may.
        """

    def label_logits(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Only the given columns: int64 ``[n]`` -> ``[R, n]`` in float64, in int8 in float32."""

    def weights_of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 ``[...]`` -> ``[..., hidden]``."""


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
