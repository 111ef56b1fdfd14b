"""Decoder layers on a GPU: torch's products, and Triton launches between them; 9 launches per layer, 10 in fp8.

Additions to the residual stream are deferred to the next norm, the last one to the model's final norm.
"""

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear

from engine.errors import ModelError
from engine.kernels.decoder_layer import LayerWeights, Linear
from engine.kernels.layer_by_layer import LayerState
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


class GpuLayer:
    """One layer of `LayerByLayer`. Operations delete tensors that are not needed after them, whose memory is reused."""

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
        self.operations = weights.operations if weights.final_norm is None else (*weights.operations, "final_norm")

    def attention_norm(self, s: LayerState) -> None:
        self._norm(s, self._weights.attention_norm)

    def qkv(self, s: LayerState) -> None:
        s.qkv = self._product("qkv", s.normed)
        del s.normed

    def rotate_and_write_kv(self, s: LayerState) -> None:
        w = self._weights
        s.query = rotate_and_write_kv(
            s.qkv, *s.angles, *s.caches, s.work.slots,
            num_q_heads=self._attention.num_q_heads, q_norm=w.q_norm, k_norm=w.k_norm, epsilon=w.epsilon,
        )  # fmt: skip
        del s.qkv

    def attend(self, s: LayerState) -> None:
        s.attended = self._attention.attend(s.query, *s.caches, s.work, self._weights.scoring).flatten(1)
        del s.query

    def select_rows(self, s: LayerState) -> None:
        """Selects attention's rows; mlp_norm selects those of the residual stream."""
        if s.output_rows is not None:
            s.attended = s.attended.index_select(0, s.output_rows)

    def output(self, s: LayerState) -> None:
        s.addend = self._summed(self._product("output", s.attended))
        del s.attended

    def mlp_norm(self, s: LayerState) -> None:
        self._norm(s, self._weights.mlp_norm, s.output_rows)
        s.addend = None

    def gate_up(self, s: LayerState) -> None:
        s.gated = swiglu(self._product("gate_up", s.normed))
        del s.normed

    def down(self, s: LayerState) -> None:
        s.addend = self._summed(self._product("down", s.gated))

    def final_norm(self, s: LayerState) -> None:
        """The model's final norm, of the output rows."""
        assert self._weights.final_norm is not None
        GpuLayer._norm(self, s, self._weights.final_norm)  # not quantised in subclasses
        s.hidden, s.addend = s.normed, None

    def _norm(self, s: LayerState, weight: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """Adds the deferred addend and norms the residual stream, in the format that the next product reads."""
        s.hidden, s.normed = add_rms_norm(s.hidden, weight, self._weights.epsilon, addend=s.addend, rows=rows)

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

    def select_rows(self, s: LayerState) -> None:
        """Quantises the output rows of attention's result. Rows that no tile wrote, as in a CUDA graph, become 0."""
        num_rows = len(s.attended) if s.output_rows is None else len(s.output_rows)
        rows = self._new_rows(num_rows, s.attended.shape[1])
        quantize_rows(s.attended, rows, s.work.row_parts, s.output_rows)
        s.attended = rows

    def gate_up(self, s: LayerState) -> None:
        found = self._product("gate_up", s.normed)
        del s.normed
        s.gated = self._new_rows(len(found), found.shape[1] // 2)
        quantized_swiglu(found, s.gated)

    def _norm(self, s: LayerState, weight: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        s.normed = self._new_rows(len(s.hidden) if rows is None else len(rows), s.hidden.shape[1])
        epsilon = self._weights.epsilon
        s.hidden, _ = add_rms_norm(s.hidden, weight, epsilon, addend=s.addend, rows=rows, normed=s.normed)

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
