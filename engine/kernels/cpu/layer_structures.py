"""What the C++ kernels take: the types of their functions' arguments, and the structures of cpp/work_items.h and
cpp/layer.h."""

import ctypes
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch

from engine.kernels.decoder_layer import DECODER_LAYER

I64, FLOAT, POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
ELEMENT_TYPES = {torch.bfloat16: "bf16", torch.float32: "float32"}
"""Suffixes of the functions of native.cpp."""

_OF_FORMATS: dict[str, list[Any]] = {
    "attend": [POINTER, I64, *[POINTER] * 6],
    "rms_norm": [*[POINTER] * 3, *[I64] * 2, FLOAT],
    "rotate_and_store": [*[POINTER] * 5, FLOAT, *[POINTER] * 4],
    "project": [*[POINTER] * 4, *[I64] * 3, ctypes.c_bool],
    "largest_column": [*[POINTER] * 4, *[I64] * 3],
    "compute_layers": [*[POINTER, I64] * 2, *[POINTER] * 5, I64],
}
"""Functions that exist for some of the suffixes below."""
SIGNATURES: dict[str, list[Any]] = {
    "draw_tokens": [*[POINTER] * 3, *[I64] * 2],
    "quantize_int8": [*[POINTER] * 4, *[I64] * 2],
    "round_columns_int8": [*[POINTER] * 4, *[I64] * 2],
    "spread_columns_int8": [POINTER, *[I64] * 2],
    "take_columns_int8": [*[POINTER] * 4, *[I64] * 2],
    "project_int8": [*[POINTER] * 4, *[I64] * 3],
    "largest_column_int8": [*[POINTER] * 5, *[I64] * 3],
    "repack_quantized": [I64, POINTER, I64, *[POINTER] * 2, *[I64] * 3],
    "repack_codes_quantized": [I64, *[POINTER] * 3, I64, POINTER, *[I64] * 3],
    "columns_quantized": [*[POINTER] * 3, *[I64] * 2],
}
"""None of these functions returns a value."""
for _name, _types in _OF_FORMATS.items():
    for _suffix in (*ELEMENT_TYPES.values(), "int8", "quantized"):
        SIGNATURES.setdefault(f"{_name}_{_suffix}", _types)

PRODUCTS = ("qkv", "output", "gate_up", "down")
SCRATCH = ("normed", "qkv", "attended", "gated", "bytes", "scales", "branch", "expert_rows", "expert_gated")


class ShapeStructure(ctypes.Structure):
    """`AttentionShape` of cpp/work_items.h."""

    _fields_ = tuple(zip(("num_q_heads", "num_kv_heads", "dim", "block_size"), repeat(ctypes.c_int32)))


class ScoringStructure(ctypes.Structure):
    """`Scoring` of cpp/work_items.h."""

    _fields_ = (("scale", FLOAT), ("softcap", FLOAT), ("window", ctypes.c_int32), ("sinks", POINTER))


class NativeWork(ctypes.Structure):
    """`AttentionWork` of cpp/work_items.h: one step's attention, prepared once and used by every layer. A thread
    computes an item for one KV head at a time. Addresses are of contiguous arrays, which `kept` owns:

    Attributes:
        slots: int64 ``[T]``, where each row's key and value are written.
        shared: int64 ``[n, 4]``, items of rows of several sequences of a group against their prefix, which is read
            once for all of them: first row, number of rows, start in prefix_blocks, prefix tokens.
        own: int64 ``[m, 7]``, items of rows of one sequence: first row, number of rows, start in own_blocks, own tokens
            that the first row sees, start in prefix_blocks, prefix tokens, tokens that shared items have covered. With
            a `shared_unit` these include the own tokens in the prefix's last, partial unit.
        prefix_blocks, own_blocks: int32 block tables.
        own_seen: int32 ``[T]``, own tokens that each row sees; a window's start is computed from it.
        state: float32 scratch memory, in which shared items leave their partial results for own items.
    """

    _fields_ = (
        *zip(("slots", "shared", "own", "prefix_blocks", "own_blocks", "own_seen", "state"), repeat(POINTER)),
        *zip(("num_rows", "num_shared", "num_own"), repeat(I64)),
    )
    num_rows: int
    kept: tuple[object, ...]


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
        *zip(("branches", "attention_norm", "q_norm", "k_norm", "mlp_norm", "final_norm"), repeat(POINTER)),
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
