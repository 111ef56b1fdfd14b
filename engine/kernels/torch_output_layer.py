"""The output layer as torch computes it, where the attention backend brings none of its own."""

import torch
from torch import nn

from engine.kernels.output_layer import columns_in_float64, mask_logits


class TorchOutputLayer:
    """The checkpoint's own output layer (`engine.kernels.attention_backend.OutputLayer`)."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear = linear

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(hidden)
        return logits

    def most_likely(self, hidden: torch.Tensor, allowed: torch.Tensor | None = None) -> torch.Tensor:
        logits = self.logits(hidden).float()
        return (logits if allowed is None else mask_logits(logits, allowed)).argmax(dim=-1)

    def label_logits(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        bias = None if self.linear.bias is None else self.linear.bias[token_ids]
        return columns_in_float64(hidden, self.weights_of(token_ids), bias)

    def weights_of(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.linear.weight[token_ids]
