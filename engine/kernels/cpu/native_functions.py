"""The functions of native.cpp: their element types, and the types of their arguments."""

import ctypes
from typing import Any

import torch

I64, INT, FLOAT, POINTER = ctypes.c_int64, ctypes.c_int, ctypes.c_float, ctypes.c_void_p

ELEMENT_TYPES = {torch.bfloat16: "bf16", torch.float32: "float32"}
"""Name suffixes of the kernels that exist once per element type."""

KERNELS: dict[str, list[Any]] = {
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
"""Argument types of the functions of native.cpp that exist once per element type."""

DRAW_TOKENS: list[Any] = [*[POINTER] * 3, *[I64] * 2]
"""Argument types of draw_tokens, which native.cpp and int8.cpp have."""
