"""The functions of native.cpp, int8.cpp and quantized.cpp, and the types of their arguments."""

import ctypes
from typing import Any

import torch

I64, FLOAT, POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
ELEMENT_TYPES = {torch.bfloat16: "bf16", torch.float32: "float32"}
"""Suffixes of the functions of native.cpp."""

_OF_FORMATS: dict[str, list[Any]] = {
    "attend": [POINTER, I64, *[POINTER] * 6],
    "rms_norm": [*[POINTER] * 3, *[I64] * 2, FLOAT],
    "rotate_and_store": [*[POINTER] * 5, FLOAT, *[POINTER] * 4],
    "swiglu": [*[POINTER] * 2, *[I64] * 2],
    "project": [*[POINTER] * 4, *[I64] * 3, ctypes.c_bool],
    "largest_column": [*[POINTER] * 4, *[I64] * 3],
    "compute_layers": [*[POINTER, I64] * 2, *[POINTER] * 5, I64],
}
"""Functions that exist for some of the suffixes below."""
SIGNATURES: dict[str, list[Any]] = {
    "draw_tokens": [*[POINTER] * 3, *[I64] * 2],
    "quantize_int8": [*[POINTER] * 3, *[I64] * 2],
    "round_columns_int8": [*[POINTER] * 5, *[I64] * 2, ctypes.c_int],
    "spread_columns_int8": [POINTER, *[I64] * 3],
    "take_columns_int8": [*[POINTER] * 3, *[I64] * 2],
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
