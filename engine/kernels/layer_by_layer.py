"""Decoder layers in Python, one after the other: torch's products, and between them a backend's own operations."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from engine.kernels.decoder_layer import TabledWork


@dataclass(slots=True, kw_only=True)
class LayerState:
    """A step on its way through one layer: what each operation reads and leaves. Tensors are ``[rows, columns]``.

    Attributes:
        hidden: the residual stream, without addend.
        addend: what the next norm adds to it; None: nothing.
        work: from the attention backend's `prepare`.
        output_rows: in the last layer, the rows that are wanted; None: all.
        query: ``[T, num_q_heads, head_dim]``.
        experts, weights: int64 and float32 ``[T, slots]``, which experts compute a row, and how they are weighed.
        normed, attended, gated: in the form in which the products take them.
    """

    hidden: torch.Tensor
    addend: torch.Tensor | None
    caches: tuple[torch.Tensor, torch.Tensor]
    work: Any
    rotation: tuple[torch.Tensor, torch.Tensor]
    output_rows: torch.Tensor | None
    normed: Any = field(init=False)
    qkv: torch.Tensor = field(init=False)
    query: torch.Tensor = field(init=False)
    attended: Any = field(init=False)
    gated: Any = field(init=False)
    branch: torch.Tensor = field(init=False)
    experts: torch.Tensor = field(init=False)
    weights: torch.Tensor = field(init=False)


class LayerInPython(Protocol):
    """Has a method for each of its operations, which takes the `LayerState`."""

    @property
    def operations(self) -> tuple[str, ...]:
        """See `LayerWeights.operations`."""


class LayerByLayer:
    """`DecoderLayers` of layers in Python, computed one after the other.

    Args:
        layers: they are taken one after the other, so that the caller can free the weights of each before the next is
            made.
    """

    def __init__(self, layers: Iterable[LayerInPython]) -> None:
        self._layers = [[getattr(layer, name) for name in layer.operations] for layer in layers]

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
        addend: torch.Tensor | None = None
        for index, operations in enumerate(self._layers):
            state = LayerState(
                hidden=hidden,
                addend=addend,
                caches=(k_caches[index], v_caches[index]),
                work=work.works[work.tables[index]] if isinstance(work, TabledWork) else work,
                rotation=(cos, sin),
                output_rows=output_rows if index == len(self._layers) - 1 else None,
            )
            for operation in operations:
                operation(state)
            hidden, addend = state.hidden, state.addend
        assert addend is None, "the last layer adds what it has computed"
        return hidden
