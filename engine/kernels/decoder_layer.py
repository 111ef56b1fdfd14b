"""A decoder layer: its weights, and the order of its operations, which all implementations share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

DECODER_LAYER = (
    "attention_norm",
    "qkv",
    "rotate_and_write_kv",
    "attend",
    "select_rows",
    "output",
    "mlp_norm",
    "gate_up",
    "down",
)
"""The operations of a layer, in order. Nothing else says the order: Python implementations call their methods of these
names, and cpp/layer.h is given the operations' numbers.

attention_norm, mlp_norm: RMSNorm of the residual stream.
qkv: query, key and value heads in one product.
rotate_and_write_kv: norms of the heads (some families), rotation, and the step's keys and values into their slots.
attend: attention of the whole token batch.
select_rows: in the last layer, drop the rows whose hidden states nobody reads.
output, down: the product, added to the residual stream.
gate_up: gate and up in one product, then silu(gate) * up.

An implementation may defer an addition to the norm that follows it.
"""

Linear = tuple[torch.Tensor, torch.Tensor | None]
"""Weights ``[columns, depth]`` and bias ``[columns]`` of a linear layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The weights of one layer as the checkpoint has them.

    Attributes:
        attention_norm, mlp_norm: ``[hidden]``.
        qkv: of query, key and value heads together.
        gate, up: weights ``[intermediate, hidden]``.
        q_norm, k_norm: ``[head_dim]`` where the family norms its heads.
        epsilon: of every norm.
        scale: of the attention scores.
    """

    attention_norm: torch.Tensor
    qkv: Linear
    output: Linear
    mlp_norm: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    epsilon: float
    scale: float


class DecoderLayers(Protocol):
    """All decoder layers of a model on one device."""

    def __call__(
        self,
        hidden: torch.Tensor,
        k_caches: Sequence[torch.Tensor],
        v_caches: Sequence[torch.Tensor],
        work: Any,
        cos: torch.Tensor,
        sin: torch.Tensor,
        output_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes the layers and writes the step's KV.

        Args:
            hidden: ``[T, hidden]``, contiguous; may be overwritten.
            k_caches, v_caches: one a layer.
            work: from the attention backend's `prepare`.
            cos, sin: float32 ``[T, head_dim]``, contiguous.
            output_rows: int64 ``[R]``; only these rows of the last layer are wanted.
        Returns:
            ``[T, hidden]``, or ``[R, hidden]``.
        """


class OutputLayer(Protocol):
    """The linear layer from hidden states ``[R, hidden]`` to the vocabulary.

    Attributes:
        bias: ``[vocab_size]``.
    """

    @property
    def bias(self) -> torch.Tensor | None: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[R, vocab_size]`` in the dtype of the weights."""

    def most_likely(self, hidden: torch.Tensor) -> torch.Tensor:
        """int64 ``[R]``: the token of the largest logit, the first of equals."""

    def weights_of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 ``[...]`` -> ``[..., hidden]``."""
