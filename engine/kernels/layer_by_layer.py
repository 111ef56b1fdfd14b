"""Decoder layers in Python, computed one after the other: torch's products, and a backend's operations between them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.kernels.decoder_layer import Angles, Caches, TabledWork


@dataclass(slots=True, kw_only=True)
class LayerState:
    """What the operations of a layer read and write in one step. Tensors are ``[rows, columns]`` unless noted.

    Attributes:
        hidden: the residual stream, without addend.
        addend: added to `hidden` by the next norm; None: nothing.
        work: from the attention backend's `prepare`.
        output_rows: the rows to keep, in the last layer; None: all.
        query: ``[T, num_q_heads, head_dim]``.
        normed, attended, gated: inputs of the products, in the backend's format.
        experts, weights: int64 and float32 ``[T, slots]``, the experts of each row and their weights.
    """

    hidden: torch.Tensor
    addend: torch.Tensor | None
    caches: tuple[torch.Tensor, torch.Tensor]
    work: Any
    angles: Angles
    output_rows: torch.Tensor | None
    normed: Any = field(init=False)
    qkv: torch.Tensor = field(init=False)
    query: torch.Tensor = field(init=False)
    attended: Any = field(init=False)
    gated: Any = field(init=False)
    branch: torch.Tensor = field(init=False)
    experts: torch.Tensor = field(init=False)
    weights: torch.Tensor = field(init=False)


class LayerByLayer:
    """`DecoderLayers` in Python, read one at a time, so that the caller can free the weights of each. A layer has
    `operations` (`LayerWeights.operations`), and a method of each name, which takes the `LayerState`."""

    def __init__(self, layers: Iterable[Any]) -> None:
        self._layers = [[getattr(layer, name) for name in layer.operations] for layer in layers]

    def __call__(
        self, hidden: torch.Tensor, caches: Caches, work: Any, angles: Angles, output_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        addend: torch.Tensor | None = None
        for index, operations in enumerate(self._layers):
            state = LayerState(
                hidden=hidden,
                addend=addend,
                caches=(caches[0][index], caches[1][index]),
                work=work.works[work.tables[index]] if isinstance(work, TabledWork) else work,
                angles=angles,
                output_rows=output_rows if index == len(self._layers) - 1 else None,
            )
            for operation in operations:
                operation(state)
            hidden, addend = state.hidden, state.addend
        assert addend is None, "the last layer has added its result"
        return hidden
