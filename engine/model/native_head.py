"""The output layer on the CPU kernels, and the embedding where the two are one table: held once, packed."""

import torch
from torch import nn

from engine.kernels.cpu.native import NativeKernels, PackedWeight


class NativeHead:
    """An output layer whose weights are packed for the kernels' products.

    Args:
        packed: its weights, ``[vocab_size, hidden]`` before they were packed.
    """

    def __init__(self, kernels: NativeKernels, packed: PackedWeight) -> None:
        self._kernels = kernels
        self._packed = packed

    @property
    def bias(self) -> torch.Tensor | None:
        """bfloat16 ``[vocab_size]``."""
        return self._packed.bias

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[R, hidden]`` -> bfloat16 ``[R, vocab_size]``."""
        return self._kernels.project(self._kernels.copy_rows(hidden), self._packed)

    def most_likely(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[R, hidden]`` -> int64 ``[R]``, the token of the largest logit; logits are never written."""
        return self._kernels.largest_column(self._kernels.copy_rows(hidden), self._packed)

    def weights_of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 ``[...]`` -> bfloat16 ``[..., hidden]``."""
        return self._packed.columns(token_ids.flatten()).view(*token_ids.shape, -1)


class NativeEmbedding(nn.Module):
    """Token embeddings out of an output layer that has the same weights."""

    def __init__(self, head: NativeHead) -> None:
        super().__init__()
        self._head = head

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 ``[1, T]`` -> ``[1, T, hidden]``."""
        return self._head.weights_of(token_ids)
