"""A decoder layer: its weights, and the order of its operations, which all implementations share."""

from collections.abc import Callable, Sequence
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
"""The operations of a layer, in order; `branched_layer` has those of other families. Python implementations call their
methods of these names, and cpp/layer.h is given the operations' numbers.

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
        window: positions that a row sees, its own included; 0: all.
        final_norm: ``[hidden]``, of the last layer where the backend's layers norm their result (`has_final_norm`).
        all_reduce: adds results of `output` and `down` up over the ranks of a sharded model, in place; None: one rank.
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
    window: int = 0
    final_norm: torch.Tensor | None = None
    all_reduce: Callable[[torch.Tensor], None] | None = None

    @property
    def operations(self) -> tuple[str, ...]:
        """In order; all layers of a model have the same."""
        return DECODER_LAYER


@dataclass(frozen=True, slots=True)
class TabledWork:
    """A step's work where layers have several block tables.

    Args:
        works: from the attention backend's `prepare`, one for each table.
        tables: of each layer, its table.
    """

    works: Sequence[Any]
    tables: Sequence[int]


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
            ``[T, hidden]``, or ``[R, hidden]``; normed where the last layer has a `final_norm`.
        """
