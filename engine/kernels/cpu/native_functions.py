"""The functions of native.cpp, int8.cpp and quantized.cpp, and the types of their arguments."""

import ctypes
from typing import Any

import torch

I64, INT, FLOAT, POINTER = ctypes.c_int64, ctypes.c_int, ctypes.c_float, ctypes.c_void_p

ELEMENT_TYPES = {torch.bfloat16: "bf16", torch.float32: "float32"}
"""Name suffixes of the functions of native.cpp that exist once per element type."""

_OF_ELEMENT_TYPES: dict[str, list[Any]] = {
    "attend": [
        *[POINTER, I64, *[POINTER] * 3, *[INT] * 4, FLOAT, FLOAT, INT, POINTER],
        *[*[POINTER, I64] * 2, *[POINTER] * 4],
    ],
    "rms_norm": [*[POINTER] * 3, *[I64] * 2, FLOAT],
    "rotate_and_store": [*[POINTER] * 5, FLOAT, *[POINTER] * 3, I64, *[INT] * 4],
    "swiglu": [*[POINTER] * 2, *[I64] * 2],
    "project": [*[POINTER] * 5, *[I64] * 3, ctypes.c_bool],
    "largest_column": [*[POINTER] * 5, *[I64] * 3],
    "compute_layers": [*[POINTER, I64] * 2, *[POINTER] * 5, I64],
}
_DRAW_TOKENS: list[Any] = [*[POINTER] * 3, *[I64] * 2]

SIGNATURES: dict[str, dict[str, list[Any]]] = {
    "native": {"draw_tokens": _DRAW_TOKENS},
    "int8": {
        "attend_int8": [*[POINTER, I64, *[POINTER] * 3, *[INT] * 4, FLOAT], *[*[POINTER, I64] * 2, *[POINTER] * 3]],
        "rotate_and_store_int8": _OF_ELEMENT_TYPES["rotate_and_store"],
        "quantize_int8": [*[POINTER] * 3, *[I64] * 2],
        "round_columns_int8": [*[POINTER] * 5, *[I64] * 2, INT],
        "spread_columns_int8": [POINTER, *[I64] * 3],
        "take_columns_int8": [*[POINTER] * 3, *[I64] * 2],
        "project_int8": [*[POINTER] * 4, *[I64] * 3],
        "largest_column_int8": _OF_ELEMENT_TYPES["largest_column"],
        "draw_tokens": _DRAW_TOKENS,
        "compute_layers_int8": _OF_ELEMENT_TYPES["compute_layers"],
    },
    "quantized": {
        "repack_quantized": [I64, POINTER, I64, *[POINTER] * 2, *[I64] * 3],
        "repack_codes_quantized": [I64, *[POINTER] * 3, I64, POINTER, *[I64] * 3],
        "columns_quantized": [*[POINTER] * 3, *[I64] * 2],
        "project_quantized": [*[POINTER] * 4, *[I64] * 3],
        "largest_column_quantized": _OF_ELEMENT_TYPES["largest_column"],
        "compute_layers_quantized": _OF_ELEMENT_TYPES["compute_layers"],
    },
}
"""By source file. None of these functions returns a value."""

for _name, _types in _OF_ELEMENT_TYPES.items():
    for _kind in ELEMENT_TYPES.values():
        SIGNATURES["native"][f"{_name}_{_kind}"] = _types
