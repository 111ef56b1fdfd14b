"""The formats of quantized weights, with their numbers and sizes in cpp/quantized/formats.h."""

from dataclasses import dataclass

import torch

HALF = 16
"""Columns of a half panel, which are stored together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedFormat:
    """A format of quantized weights.

    Attributes:
        kind: its number in cpp/quantized/formats.h.
        block_depth: weights of one column in a block, which share a scale, or a scale of scales.
        packed_bytes: bytes of a block of 16 columns in memory.
    """

    kind: int
    block_depth: int
    packed_bytes: int


def _formats() -> dict[str, QuantizedFormat]:
    found = {}
    names = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
    for kind, name in enumerate(names):
        depth, num_fine = (256, 16) if name.endswith("K") else (32, 0)
        num_scales = 2 if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 1
        packed_bytes = HALF * (2 * num_scales + num_fine + depth * int(name[1]) // 8)
        found[name] = QuantizedFormat(kind=kind, block_depth=depth, packed_bytes=packed_bytes)
    return found


def plain_format(dtype: torch.dtype) -> QuantizedFormat:
    """The format of weights that are not quantized, in the dtype that products compute in, bfloat16 or float32."""
    return QuantizedFormat(kind=len(FORMATS), block_depth=32, packed_bytes=HALF * 32 * dtype.itemsize)


def grouped_format(*, num_bits: int, has_zeros: bool, group: int, dtype: torch.dtype) -> QuantizedFormat:
    """The format of safetensors files with one scale for each group of consecutive weights of a column.

    Args:
        num_bits: of a code: 4, or 8 without zero points.
        has_zeros: whether each group has its own zero point; else it is 8 for codes of 4 bits and 0 for 8 bits.
        group: weights of a group, a multiple of 32.
        dtype: of scales, float16 or bfloat16.
    """
    depth = 32 if group % 128 else 128
    kind = len(FORMATS) + 1 + 8 * (num_bits == 8) + 4 * has_zeros + 2 * (depth == 128) + (dtype == torch.bfloat16)
    packed_bytes = HALF * ((3 if has_zeros else 2) + depth * num_bits // 8)
    return QuantizedFormat(kind=kind, block_depth=depth, packed_bytes=packed_bytes)


FORMATS = _formats()
"""By their names in GGUF files."""
