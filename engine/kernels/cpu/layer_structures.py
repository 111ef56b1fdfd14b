"""The structures of cpp/layer.h: the weights of a layer, and the arrays of a step."""

import ctypes
from collections.abc import Sequence
from itertools import repeat
from typing import Any, Self

import torch

from engine.kernels.cpu.native_functions import FLOAT, I64, POINTER, address
from engine.kernels.cpu.native_work import ScoringStructure, ShapeStructure, WorkStructure
from engine.kernels.decoder_layer import DECODER_LAYER, LayerWeights

PRODUCTS = ("qkv", "output", "gate_up", "down")
SCRATCH = ("normed", "qkv", "attended", "gated", "bytes", "scales", "branch", "expert_rows", "expert_gated")


class LinearStructure(ctypes.Structure):
    """`PanelWeights` of cpp/product.h, and `QuantizedWeights` of cpp/quantized/quantized_product.h."""

    _fields_ = (("panels", POINTER), ("bias", POINTER))


class PackedLayer(ctypes.Structure):
    """`LayerWeights` of cpp/layer.h without its products, whose structures depend on the format."""

    _fields_ = (
        *(("shape", ShapeStructure), ("scoring", ScoringStructure)),
        *zip(("hidden_size", "intermediate_size"), repeat(I64)),
        ("epsilon", FLOAT),
        *zip(("rotation", "table"), repeat(ctypes.c_int32)),
        *zip(("branches", "attention_norm", "q_norm", "k_norm", "mlp_norm"), repeat(POINTER)),
    )
    kept: tuple[object, ...]  # owners of the memory that the addresses point to
    operations: Sequence[int] = range(len(DECODER_LAYER))  # numbers of `Operation` in cpp/layer.h
    num_branch_columns: tuple[int, ...] = ()  # columns of the SCRATCH arrays from `bytes` on, of branched layers
    hidden_size: int
    intermediate_size: int
    down: Any  # the structure of a product

    @classmethod
    def pack(
        cls,
        kernels: Any,
        weights: LayerWeights,
        products: Sequence[Any],
        norms: Sequence[torch.Tensor | None] | None = None,
    ) -> Self:
        """A layer.

        Args:
            kernels: of the layer's `AttentionShape`; a `NativeBackend` for layers of `engine.kernels.branched_layer`.
            weights: the layer in the checkpoint's layout.
            products: its packed weights in the order of PRODUCTS, each with its `structure`.
            norms: in place of the layer's, in the order of the fields.
        """
        if norms is None:
            norms = weights.attention_norm, weights.q_norm, weights.k_norm, weights.mlp_norm
        scoring, sizes = ScoringStructure(weights.scoring), (weights.gate.shape[1], weights.down.shape[1])
        packed = cls(
            *(kernels.structure, scoring, *sizes, weights.epsilon, 0, 0, None, *map(address, norms)),
            *(product.structure for product in products),
        )
        packed.kept = norms, products, scoring
        if type(weights) is not LayerWeights:
            from engine.kernels.cpu.branched_layers import complete  # imported only when needed

            complete(packed, weights, kernels)
        return packed


class PanelLayer(PackedLayer):
    """Weights in bf16, float32 or quantized; gate and up are one product."""

    _fields_ = tuple(zip(PRODUCTS, repeat(LinearStructure)))


class LayerStep(ctypes.Structure):
    """`LayerStep` of cpp/layer.h."""

    _fields_ = (("work", WorkStructure), *zip(("cos", "sin", *SCRATCH), repeat(POINTER)))
