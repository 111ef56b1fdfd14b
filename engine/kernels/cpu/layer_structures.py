"""The structures of cpp/layer.h: the weights of a layer, and the arrays of a step."""

import ctypes
from collections.abc import Sequence
from itertools import repeat
from typing import Any

from engine.kernels.cpu.native_functions import FLOAT, I64, POINTER
from engine.kernels.cpu.native_work import NativeWork, ScoringStructure, ShapeStructure
from engine.kernels.decoder_layer import DECODER_LAYER

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
    scoring: Any
    down: Any  # the structure of a product


class PanelLayer(PackedLayer):
    """Weights in bf16, float32 or quantized; gate and up are one product."""

    _fields_ = tuple(zip(PRODUCTS, repeat(LinearStructure)))


class LayerStep(ctypes.Structure):
    """`LayerStep` of cpp/layer.h."""

    _fields_ = (("work", NativeWork), *zip(("cos", "sin", *SCRATCH), repeat(POINTER)))
