"""Int8 on the CPU: one scale per output column of the weights, per input row, and per head and token of the KV.

Answers do not depend on the batch (cpp/int8/quads.h says why). `engine.kernels.cpu.int8_weights` converts the weights.
"""

import ctypes
from collections.abc import Iterable
from pathlib import Path

import torch

from engine.errors import ModelError
from engine.kernels import cdiv
from engine.kernels.attention_backend import AttentionBackend
from engine.kernels.cpu.attention_shape import TILE_ROWS
from engine.kernels.cpu.int8_weights import (
    ALIGNED_DEPTH,
    PANEL,
    Int8Weight,
    LayerPacker,
    PackedInt8,
    channel_factors,
    columns_in_pieces,
)
from engine.kernels.cpu.layer_structures import PRODUCTS, PackedLayer
from engine.kernels.cpu.native_build import address, load_library
from engine.kernels.cpu.native_layers import PackedLayers, fill_layer
from engine.kernels.cpu.native_operations import NativeOperations
from engine.kernels.decoder_layer import DecoderLayers, LayerWeights

CHUNK_TOKENS = 128
"""KV tokens whose attention weights share a scale; the same as CHUNK in cpp/int8/quad_attention.h."""


class _Int8Layer(PackedLayer):
    """`LayerWeights` of cpp/layer.h; the weights of attention_norm and mlp_norm are folded into the products, and the
    channels' factors are in their place."""

    _fields_ = tuple((name, Int8Weight) for name in PRODUCTS)


class Int8Backend(NativeOperations, AttentionBackend):
    """Decoder layers, attention and output layer in int8; hidden states, queries and attention outputs are bfloat16.
    Attention has no softcap, window and sinks; cpp/int8/quad_attention.h describes the layout of the KV. Takes the
    arguments and raises the errors of `NativeBackend`, which describes them."""

    name = "native"

    def __init__(self, *, folder: Path, **shape: int) -> None:
        super().__init__(**shape, shared_unit=CHUNK_TOKENS)
        self.library, self.suffix, self.dtype = load_library(folder, "int8"), "int8", torch.bfloat16

    def make_layers(self, weights: Iterable[LayerWeights]) -> DecoderLayers:
        """Layers in one C++ call, read one at a time (see `NativeBackend.make_layers`). Raises `ModelError` if a size
        of the layers is not supported, or they have a sliding window."""
        self._packer = LayerPacker(self.library, self.num_q_heads, self.num_kv_heads, self.head_dim)
        packed = [self._pack(layer) for layer in weights]
        depth = max(packed[0].hidden_size, packed[0].intermediate_size, self.num_q_heads * self.head_dim)
        num_byte_columns = cdiv(depth, ALIGNED_DEPTH) * ALIGNED_DEPTH
        return PackedLayers(self, self.kernel("compute_layers"), packed, num_byte_columns)

    def _pack(self, layer: LayerWeights) -> _Int8Layer:
        sizes = layer.gate.shape[1], len(layer.gate), len(layer.qkv[0])
        if any(size % PANEL for size in sizes):
            hidden, intermediate, qkv = sizes
            raise ModelError(
                "dtype 'int8' takes sizes that are multiples of 32, got a hidden size of "
                f"{hidden}, an intermediate size of {intermediate} and {qkv} columns of queries, keys and values"
            )
        if layer.scoring.window:
            raise ModelError(f"dtype 'int8' has no sliding window, got one of {layer.scoring.window} positions")
        products, factors = self._packer.pack(layer)
        packed = fill_layer(_Int8Layer, self, layer, products)
        others = layer.q_norm, layer.k_norm, layer.final_norm
        norms = [*factors, *(None if norm is None else norm.float() for norm in others)]
        packed.attention_norm, packed.mlp_norm, packed.q_norm, packed.k_norm, packed.final_norm = map(address, norms)
        packed.kept = norms, *packed.kept
        return packed

    def make_output_layer(self, weight: torch.Tensor, bias: torch.Tensor | None) -> "Int8OutputLayer":
        """The output layer of the model whose layers were made last."""
        return Int8OutputLayer(self.library, weight, bias, self._packer.energy)


class Int8OutputLayer:
    """An output layer (`engine.kernels.attention_backend.OutputLayer`) in int8; its logits are float32.

    Args:
        library: the kernels of int8.
        weight: ``[vocab_size, hidden]``.
        bias: ``[vocab_size]``.
        energy: float64 ``[hidden]``, mean square of each input channel.
    """

    def __init__(
        self, library: ctypes.CDLL, weight: torch.Tensor, bias: torch.Tensor | None, energy: torch.Tensor
    ) -> None:
        self._library = library
        self._factors = channel_factors(weight, energy)
        self._packed = PackedInt8(library, columns_in_pieces(library, weight, 1 / self._factors), bias)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        rows, scales = self._quantize(hidden)
        out = torch.empty(len(hidden), len(self._packed.scales), dtype=torch.float32)
        self._library.project_int8(
            *(rows.data_ptr(), scales.data_ptr(), ctypes.byref(self._packed.structure), out.data_ptr()),
            *(*out.shape, hidden.shape[1]),
        )
        return out[:, : self._packed.num_columns]

    def most_likely(self, hidden: torch.Tensor, allowed: torch.Tensor | None = None) -> torch.Tensor:
        """Does not store the logits."""
        rows, scales = self._quantize(hidden)
        out, num_columns = torch.empty(len(hidden), dtype=torch.int64), len(self._packed.scales)
        assert allowed is None or (allowed.shape == (len(hidden), num_columns // 32) and allowed.is_contiguous())
        self._library.largest_column_int8(
            *(rows.data_ptr(), scales.data_ptr(), ctypes.byref(self._packed.structure)),
            *(address(allowed), out.data_ptr()),
            *(len(hidden), num_columns, hidden.shape[1]),
        )
        return out

    def label_logits(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """The same values as in `logits`: sums of these integers are exact in float64, in any order."""
        rows, row_scales = self._quantize(hidden)
        columns, scales = self._packed.columns(token_ids)
        sums = (rows[: len(hidden), : self._packed.depth].double() - 128) @ columns.double().T
        logits = sums.float() * scales * row_scales[: len(hidden), None]
        bias = self._packed.bias
        return logits if bias is None else logits + bias[token_ids]

    def weights_of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """bfloat16 ``[..., hidden]``."""
        ids = token_ids.contiguous()
        out = torch.empty(*ids.shape, self._packed.depth, dtype=torch.bfloat16)
        self._library.take_columns_int8(
            *(ctypes.byref(self._packed.structure), self._factors.data_ptr(), ids.data_ptr(), out.data_ptr()),
            *(ids.numel(), self._packed.depth),
        )
        return out

    def _quantize(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows as unsigned bytes, padded for the kernels, and their scales."""
        num_rows = cdiv(len(hidden), TILE_ROWS) * TILE_ROWS
        rows = torch.empty(num_rows, cdiv(hidden.shape[1], ALIGNED_DEPTH) * ALIGNED_DEPTH, dtype=torch.uint8)
        scales, hidden = torch.empty(num_rows, dtype=torch.float32), hidden.contiguous()
        addresses = map(address, (hidden, self._factors, rows, scales))
        self._library.quantize_int8(*addresses, *hidden.shape)
        return rows, scales
