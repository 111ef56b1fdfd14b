"""The structures of cpp/layer.h: the weights of a layer, and the arrays of a step."""

import ctypes
from collections.abc import Sequence
from itertools import product, repeat
from typing import Any

from engine.kernels.cpu.native_functions import FLOAT, I64, POINTER
from engine.kernels.decoder_layer import DECODER_LAYER

NORMS = ("attention_norm", "q_norm", "k_norm", "mlp_norm")
PRODUCTS = ("qkv", "output", "gate_up", "down")
LAYER_SIZES: tuple[tuple[str, Any], ...] = (
    *zip(("hidden_size", "intermediate_size"), repeat(I64)),
    *zip(("num_q_heads", "num_kv_heads", "dim", "block_size", "window"), repeat(ctypes.c_int32)),
    *zip(("epsilon", "scale"), repeat(FLOAT)),
    *zip(("rotation", "table"), repeat(ctypes.c_int32)),
    ("branches", POINTER),
)
"""Fields of `LayerWeights` in cpp/layer.h, which come in this order; the fields of a product depend on the format."""

STEP_ARRAYS = ("cos", "sin", "slots", "shared", "own", "prefix_blocks", "own_blocks", "own_seen", "state")
SCRATCH = ("normed", "qkv", "attended", "gated", "bytes", "scales", "branch", "expert_rows", "expert_gated")


class PackedLayer(ctypes.Structure):
    """`LayerWeights` of cpp/layer.h; gate and up are one product."""

    kept: tuple[object, ...]  # owners of the memory that the addresses point to
    operations: Sequence[int] = range(len(DECODER_LAYER))  # numbers of `Operation` in cpp/layer.h
    num_branch_columns: tuple[int, ...] = ()  # columns of the SCRATCH arrays from `bytes` on, of branched layers
    hidden_size: int
    intermediate_size: int


class PanelLayer(PackedLayer):
    """Weights in bf16, float32 or quantized: panels and a bias for each product."""

    _fields_ = (
        *zip(NORMS, repeat(POINTER)),
        *zip(map("_".join, product(PRODUCTS, ("panels", "bias"))), repeat(POINTER)),
        *LAYER_SIZES,
    )


class LayerStep(ctypes.Structure):
    """`LayerStep` of cpp/layer.h."""

    _fields_ = (
        *zip(STEP_ARRAYS, repeat(POINTER)),
        *zip(("num_rows", "num_shared", "num_own"), repeat(I64)),
        *zip(SCRATCH, repeat(POINTER)),
    )
