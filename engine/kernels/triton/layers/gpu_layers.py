"""Decoder layers on a GPU: torch's products, and Triton launches between them; 9 launches per layer, 10 in fp8.

Additions to the residual stream are deferred to the next norm, the last one to the model's final norm.
"""

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear

from engine.errors import ModelError
from engine.kernels.decoder_layer import Angles, Caches, LayerWeights, Linear, TabledWork
from engine.kernels.triton.layers.fp8 import (
    ScaledRows,
    quantize_rows,
    quantize_weights,
    quantized_swiglu,
    scaled_linear,
)
from engine.kernels.triton.layers.layer_kernels import add_rms_norm, rotate_and_write_kv, swiglu

if TYPE_CHECKING:
    from engine.kernels.triton.triton_attention import TritonAttention

MULTIPLE = 16
"""The rows and columns of a matrix must be multiples of it for fp8 products."""


class GpuLayers:
    """`DecoderLayers`, read one at a time, so that the caller can free the weights of each."""

    def __init__(self, layers: Iterable["GpuLayer"]) -> None:
        self._layers = list(layers)

    def __call__(
        self,
        hidden: torch.Tensor,
        caches: Caches,
        work: TabledWork,
        angles: Angles,
        output_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        addend: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            hidden, addend = layer(
                hidden,
                addend,
                (caches[0][index], caches[1][index]),
                work.works[work.tables[index]],
                angles,
                output_rows if index == len(self._layers) - 1 else None,
            )
        assert addend is None, "the last layer has added its result"
        return hidden


class GpuLayer:
    """One layer of `GpuLayers`. It deletes tensors once they are not needed, so that their memory is reused."""

    def __init__(self, attention: "TritonAttention", weights: LayerWeights) -> None:
        self._attention = attention
        self._linears: dict[str, Linear] = {
            "qkv": weights.qkv,
            "output": weights.output,
            "gate_up": (torch.cat([weights.gate, weights.up]), None),
            "down": (weights.down, None),
        }
        none = weights.down.new_empty(0)  # `_linears` has the only references to matrices, so that they can be freed
        self._weights = replace(weights, qkv=(none, None), output=(none, None), gate=none, up=none, down=none)

    def __call__(
        self,
        hidden: torch.Tensor,
        addend: torch.Tensor | None,
        caches: tuple[torch.Tensor, torch.Tensor],
        work: Any,
        angles: Angles,
        output_rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The residual stream, ``[rows, hidden]``, and what the next norm adds to it. The layer with the model's final
        norm returns its result, and nothing to add.

        Args:
            hidden: the residual stream.
            addend: what is to be added to it; None: nothing.
            caches: keys and values of this layer.
            work: from the attention backend's `prepare`.
            output_rows: the rows to keep, in the last layer; None: all.
        """
        w = self._weights
        hidden, normed = self._norm(hidden, w.attention_norm, addend)
        qkv = self._product("qkv", normed)
        del normed
        query = rotate_and_write_kv(
            qkv, *angles, *caches, work.slots,
            num_q_heads=self._attention.num_q_heads, q_norm=w.q_norm, k_norm=w.k_norm, epsilon=w.epsilon,
        )  # fmt: skip
        del qkv
        attended = self._attention.attend(query, *caches, work, w.scoring).flatten(1)
        del query
        attended = self._select_rows(attended, work, output_rows)
        addend = self._summed(self._product("output", attended))
        del attended
        hidden, normed = self._norm(hidden, w.mlp_norm, addend, output_rows)
        del addend
        gate_up = self._product("gate_up", normed)
        del normed
        gated = self._swiglu(gate_up)
        del gate_up
        addend = self._summed(self._product("down", gated))
        if w.final_norm is None:
            return hidden, addend
        return GpuLayer._norm(self, hidden, w.final_norm, addend)[1], None  # not quantised in subclasses

    def _select_rows(self, attended: torch.Tensor, work: Any, output_rows: torch.Tensor | None) -> Any:
        """The output rows of attention's result, in the format that the next product reads."""
        return attended if output_rows is None else attended.index_select(0, output_rows)

    def _swiglu(self, gate_up: torch.Tensor) -> Any:
        """silu(gate) * up, in the format that the next product reads."""
        return swiglu(gate_up)

    def _norm(
        self, hidden: torch.Tensor, weight: torch.Tensor, addend: torch.Tensor | None, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Any]:
        """The given rows of the residual stream plus addend, and their norm in the format that the next product
        reads."""
        return add_rms_norm(hidden, weight, self._weights.epsilon, addend=addend, rows=rows)

    def _product(self, name: str, rows: Any) -> torch.Tensor:
        return linear(rows, *self._linears[name])

    def _summed(self, partial_sum: torch.Tensor) -> torch.Tensor:
        if self._weights.all_reduce is not None:
            self._weights.all_reduce(partial_sum)
        return partial_sum


class Fp8Layer(GpuLayer):
    """`GpuLayer` with products in 8-bit floating point (fp8.py), whose results have 16 bits. One launch more quantises
    attention's result and selects its rows; the other inputs of products are quantised by the launches that compute
    them, the norms and SwiGLU. Raises `ModelError` if products of `dtype` do not support the size of a matrix."""

    def __init__(self, attention: "TritonAttention", weights: LayerWeights, dtype: torch.dtype) -> None:
        super().__init__(attention, weights)
        self._dtype = dtype
        self._scaled: dict[str, ScaledRows] = {}
        for name, (matrix, bias) in self._linears.items():
            if matrix.shape[0] % MULTIPLE or matrix.shape[1] % MULTIPLE:
                raise ModelError(f"dtype 'fp8' needs multiples of {MULTIPLE}, matrix {name} is {tuple(matrix.shape)}")
            self._scaled[name] = quantize_weights(matrix, dtype)
            self._linears[name] = (matrix.new_empty(0), bias)

    def _select_rows(self, attended: torch.Tensor, work: Any, output_rows: torch.Tensor | None) -> ScaledRows:
        """Rows that no tile wrote, as in a CUDA graph, become 0."""
        num_rows = len(attended) if output_rows is None else len(output_rows)
        rows = self._new_rows(num_rows, attended.shape[1])
        quantize_rows(attended, rows, work.row_parts, output_rows)
        return rows

    def _swiglu(self, gate_up: torch.Tensor) -> ScaledRows:
        gated = self._new_rows(len(gate_up), gate_up.shape[1] // 2)
        quantized_swiglu(gate_up, gated)
        return gated

    def _norm(
        self, hidden: torch.Tensor, weight: torch.Tensor, addend: torch.Tensor | None, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ScaledRows]:
        normed = self._new_rows(len(hidden) if rows is None else len(rows), hidden.shape[1])
        hidden, _ = add_rms_norm(hidden, weight, self._weights.epsilon, addend=addend, rows=rows, normed=normed)
        return hidden, normed

    def _product(self, name: str, rows: ScaledRows) -> torch.Tensor:
        return scaled_linear(rows, self._scaled[name], self._linears[name][1], self._attention.dtype)

    def _new_rows(self, num_rows: int, size: int) -> ScaledRows:
        return ScaledRows.empty(num_rows, size, self._dtype, self._attention.device)


def weights_on(device: torch.device, weights: LayerWeights) -> LayerWeights:
    """The weights of a layer, copied to the device where they are not on it."""

    def moved(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(moved, value))
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return replace(weights, **{field.name: moved(getattr(weights, field.name)) for field in fields(weights)})
