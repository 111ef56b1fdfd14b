"""The weights of a decoder layer, and the order of its operations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.kernels.scoring import Scoring

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
"""The operations of a plain layer, in order; `branched_layer` has more. cpp/layer.h takes their numbers; `GpuLayer` has
the same order.

attention_norm, mlp_norm: RMSNorm of the residual stream.
qkv: query, key and value heads in one product.
rotate_and_write_kv: norms query and key heads (some families), rotates them, writes keys and values to their slots.
attend: attention of the whole token batch.
select_rows: in the last layer, keeps only the step's output rows.
output, down: a product, added to the residual stream.
gate_up: gate and up in one product, then silu(gate) * up.

An implementation may defer an addition to the next norm.
"""

Linear = tuple[torch.Tensor, torch.Tensor | None]
"""Weights ``[columns, depth]`` and bias ``[columns]`` of a linear layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The weights of one layer, in the checkpoint's layout.

    Attributes:
        attention_norm, mlp_norm: ``[hidden]``.
        qkv: query, key and value heads concatenated.
        gate, up: ``[intermediate, hidden]``.
        q_norm, k_norm: ``[head_dim]``; None: heads are not normed.
        final_norm: ``[hidden]``, of the model, in the last of plain layers; None: the layers do not compute it.
        all_reduce: sums the results of `output` and `down` over the ranks of a sharded model, in place; None: one rank.
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
    scoring: Scoring
    final_norm: torch.Tensor | None = None
    all_reduce: Callable[[torch.Tensor], None] | None = None

    @property
    def operations(self) -> tuple[str, ...]:
        """In order; the same for all layers of a model."""
        return DECODER_LAYER


@dataclass(frozen=True, slots=True)
class TabledWork:
    """A step's work: what the attention backend's `prepare` returned for each block table, and each layer's table."""

    works: Sequence[Any]
    tables: Sequence[int]


Caches = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
"""Keys and values of all layers."""

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of rows, float32 ``[T, head_dim]``, contiguous."""


class DecoderLayers(Protocol):
    """All decoder layers of a model on one device."""

    def __call__(
        self,
        hidden: torch.Tensor,
        caches: Caches,
        work: TabledWork,
        angles: Angles,
        output_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes the layers and writes the step's KV. Returns ``[T, hidden]`` or ``[R, hidden]``, normed if the last
        layer has a `final_norm`.

        Args:
            hidden: ``[T, hidden]``, contiguous; may be overwritten.
            output_rows: int64 ``[R]``, the rows of the last layer to return; None: all.
        """
