"""Decoder layers and output layers with packed weights, computed by the C++ kernels."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, Union

import torch

from engine.kernels import cdiv
from engine.kernels.cpu.attention_shape import TILE_ROWS, AttentionShape
from engine.kernels.cpu.branched_layers import complete, pack_gate_up
from engine.kernels.cpu.layer_structures import LayerStep, LinearStructure, PackedLayer, PanelLayer
from engine.kernels.cpu.native_build import address
from engine.kernels.decoder_layer import Angles, Caches, LayerWeights, TabledWork

if TYPE_CHECKING:
    from engine.kernels.cpu.native import NativeBackend
    from engine.kernels.cpu.quantized import QuantizedWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """Weights of a linear layer in the layout that the matrix kernels read; `QuantizedWeight` may take its place.

    Attributes:
        kernel: gives the functions for weights of this kind by name.
        panels: bfloat16 or float32, panels of 32 output columns, of which 16 or all are stored together.
        bias: of the same type, ``[num_columns]``.
        num_columns, num_padded: output columns, without and with those that fill the last panel.
        is_gated: whether a panel holds 16 columns of the gate, then the same 16 columns of up.
    """

    kernel: Callable[[str], Callable[..., None]]
    panels: torch.Tensor
    bias: torch.Tensor | None
    num_columns: int
    depth: int
    is_gated: bool = False

    @property
    def num_padded(self) -> int:
        return self.num_columns

    @property
    def structure(self) -> LinearStructure:
        return LinearStructure(address(self.panels), address(self.bias))

    def columns(self, index: torch.Tensor) -> torch.Tensor:
        """int64 ``[n]`` -> ``[n, depth]``: the weights of these output columns, unpacked."""
        assert not self.is_gated, "a column index is ambiguous between gate and up"
        words = self.panels.view(torch.int32)[..., 0]
        return words[index // words.shape[2], :, index % words.shape[2]].view(self.panels.dtype)


LinearWeight = Union[PackedWeight, "QuantizedWeight"]
Layer = TypeVar("Layer", bound=PackedLayer)


def in_one_allocation(weights: Sequence[PackedWeight]) -> list[PackedWeight]:
    """Copies of the weights in one allocation, so that small weights share pages of 2 MB."""
    joined = torch.cat([weight.panels.flatten() for weight in weights])
    parts = torch.split(joined, [weight.panels.numel() for weight in weights])
    return [replace(weight, panels=part.view_as(weight.panels)) for weight, part in zip(weights, parts, strict=True)]


class PackedOutputLayer:
    """An output layer (`engine.kernels.attention_backend.OutputLayer`), or an embedding table, with packed weights."""

    def __init__(self, kernels: "NativeBackend", weight: LinearWeight) -> None:
        self._kernels = kernels
        self._weight = weight

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._kernels.project(self._kernels.copy_rows(hidden), self._weight)[:, : self._weight.num_columns]

    def most_likely(self, hidden: torch.Tensor, allowed: torch.Tensor | None = None) -> torch.Tensor:
        """Does not store the logits."""
        return self._kernels.largest_column(self._kernels.copy_rows(hidden), self._weight, allowed)

    def label_logits(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        bias = None if self._weight.bias is None else self._weight.bias[token_ids]
        return self._kernels.label_columns(hidden, self.weights_of(token_ids), bias)

    def weights_of(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._weight.columns(token_ids.flatten()).view(*token_ids.shape, -1)


def pack_layer(kernels: "NativeBackend", layer: LayerWeights) -> PanelLayer | None:
    """A layer for `PackedLayers`; None where the kernels do not support its sizes."""
    is_plain = type(layer) is LayerWeights
    qkv, output, down = kernels.pack(*layer.qkv), kernels.pack(*layer.output), kernels.pack(layer.down)
    gate_up = kernels.pack_gated(layer.gate, layer.up) if is_plain else pack_gate_up(kernels, layer)
    if qkv is None or output is None or gate_up is None or down is None:
        return None
    return fill_layer(PanelLayer, kernels, layer, in_one_allocation((qkv, output, gate_up, down)))


def fill_layer(kind: type[Layer], kernels: Any, weights: LayerWeights, products: Sequence[Any]) -> Layer:
    """A layer of a format.

    Args:
        kind: the format's structure.
        kernels: of the layer's `AttentionShape`; a `NativeBackend` for layers of `engine.kernels.branched_layer`.
        weights: the layer in the checkpoint's layout.
        products: its packed weights in the order of PRODUCTS, each with its `structure`.
    """
    norms = weights.attention_norm, weights.q_norm, weights.k_norm, weights.mlp_norm, weights.final_norm
    scoring, sizes = weights.scoring, (weights.gate.shape[1], weights.down.shape[1])
    packed = kind(
        *(kernels.structure, (scoring.scale, scoring.softcap, scoring.window, None), *sizes, weights.epsilon, 0, 0),
        *(None, *map(address, norms), *(product.structure for product in products)),
    )
    packed.kept = norms, products
    if type(weights) is not LayerWeights:
        complete(packed, weights, kernels)
    return packed


class PackedLayers:
    """`engine.kernels.decoder_layer.DecoderLayers` in one C++ call.

    Args:
        kernels: of the layers' attention shape and the type of their rows.
        compute: `compute_layers` of the layers' format.
        layers: all of one format and one shape.
        num_byte_columns: int8 only: largest padded depth of a product, in bytes.
    """

    def __init__(
        self,
        kernels: AttentionShape,
        compute: Callable[..., None],
        layers: Sequence[PackedLayer],
        num_byte_columns: int = 0,
    ) -> None:
        self._compute = compute
        self._layers = layers  # owners of the weights' memory
        operations = layers[0].operations
        self._operations = (ctypes.c_int32 * len(operations))(*operations)
        self._weights = (type(layers[0]) * len(layers))(*layers)
        q_size, kv_size = (heads * kernels.head_dim for heads in (kernels.num_q_heads, kernels.num_kv_heads))
        # Columns of the SCRATCH arrays, in elements of a row: in int8, where they are bf16, a float32 scale takes two.
        self._columns = [layers[0].hidden_size, q_size + 2 * kv_size, q_size, layers[0].intermediate_size]
        if num_byte_columns:
            self._columns += (num_byte_columns // 2, 2)
        self._columns += map(max, zip(*(layer.num_branch_columns for layer in layers), strict=True))
        self._scratch = torch.empty(0, dtype=kernels.dtype)

    def __call__(
        self,
        hidden: torch.Tensor,
        caches: Caches,
        work: TabledWork,
        angles: Angles,
        output_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes in place: returns `hidden`, or its first rows. See `DecoderLayers`."""
        assert hidden.is_contiguous(), "the kernels take contiguous rows"
        num_rows = len(hidden)
        num_tile_rows = cdiv(num_rows, TILE_ROWS) * TILE_ROWS
        sizes = [num_tile_rows * columns for columns in self._columns]
        if self._scratch.numel() < sum(sizes):
            self._scratch = self._scratch.new_empty(sum(sizes))
        for layer, table in zip(self._weights, work.tables, strict=True):
            layer.table = table
        shared = [*map(address, (*angles, *torch.split(self._scratch[: sum(sizes)], sizes)))]
        steps = [LayerStep(each, *shared) for each in work.works]
        num_output_rows = -1 if output_rows is None else len(output_rows)
        self._compute(
            *(self._weights, len(self._layers), self._operations, len(self._operations)),
            *((LayerStep * len(steps))(*steps), hidden.data_ptr(), *map(_addresses, caches)),
            *(address(output_rows), num_output_rows),
        )
        return hidden if output_rows is None else hidden[:num_output_rows]


def _addresses(tensors: Sequence[torch.Tensor]) -> "ctypes.Array[ctypes.c_void_p]":
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
