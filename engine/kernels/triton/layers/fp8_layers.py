"""A decoder layer with products in 8-bit floating point (fp8.py), whose results have 16 bits."""

from typing import TYPE_CHECKING

import torch

from engine.errors import ModelError
from engine.kernels.decoder_layer import LayerWeights
from engine.kernels.layer_by_layer import LayerState
from engine.kernels.triton.layers.fp8 import (
    ScaledRows,
    quantize_rows,
    quantize_weights,
    quantized_swiglu,
    scaled_linear,
)
from engine.kernels.triton.layers.gpu_layers import GpuLayer
from engine.kernels.triton.layers.layer_kernels import add_rms_norm

if TYPE_CHECKING:
    from engine.kernels.triton.triton_attention import TritonAttention

MULTIPLE = 16
"""The rows and columns of a matrix must be multiples of it for fp8 products."""


class Fp8Layer(GpuLayer):
    """`GpuLayer` in 10 launches: one more quantises attention's result and selects its rows. The other inputs of
    products are quantised by the launches that compute them, the norms and SwiGLU. Raises `ModelError` if the size of a
    matrix is not supported by products of `dtype`."""

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
