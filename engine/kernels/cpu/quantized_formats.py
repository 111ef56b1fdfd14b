"""The formats of quantized weights, by the numbers and sizes that cpp/quantized/quantized.h has for them."""

from dataclasses import dataclass

import torch

HALF = 16
"""Columns that lie together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedFormat:
    """A format of weights, as cpp/quantized/quantized.h has it.

    Attributes:
        kind: its number there.
        block_depth: weights of a column that have a scale in common, or scales of one more scale.
        file_bytes: of a block in a GGUF file.
        packed_bytes: of a block of 16 columns in memory.
    """

    kind: int
    block_depth: int
    file_bytes: int
    packed_bytes: int


def _formats() -> dict[str, QuantizedFormat]:
    found = {}
    for kind, (name, file_bytes, num_fine) in enumerate(
        [
            ("Q4_0", 18, 0),
            ("Q4_1", 20, 0),
            ("Q5_0", 22, 0),
            ("Q5_1", 24, 0),
            ("Q8_0", 34, 0),
            ("Q4_K", 144, 16),
            ("Q5_K", 176, 16),
            ("Q6_K", 210, 16),
            ("BF16", 64, 0),
        ]
    ):
        depth = 256 if name.endswith("K") else 32
        num_scales = 2 if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 0 if name == "BF16" else 1
        num_code_bits = 16 if name == "BF16" else int(name[1])
        packed_bytes = HALF * (2 * num_scales + num_fine + depth * num_code_bits // 8)
        found[name] = QuantizedFormat(kind=kind, block_depth=depth, file_bytes=file_bytes, packed_bytes=packed_bytes)
    return found


def grouped_format(*, num_bits: int, has_zeros: bool, group: int, dtype: torch.dtype) -> QuantizedFormat:
    """Codes of safetensors files, with a scale for each group of neighbours in a column.

    Args:
        num_bits: 4, or 8 without zeros.
        has_zeros: whether each group has a zero of its own; else it is 8, of codes of 8 bits 0.
        group: weights of a column that have a scale in common; a multiple of 32.
        dtype: of scales, float16 or bfloat16.
    """
    depth = 32 if group % 128 else 128
    kind = len(FORMATS) + 8 * (num_bits == 8) + 4 * has_zeros + 2 * (depth == 128) + (dtype == torch.bfloat16)
    packed_bytes = HALF * ((3 if has_zeros else 2) + depth * num_bits // 8)
    return QuantizedFormat(kind=kind, block_depth=depth, file_bytes=0, packed_bytes=packed_bytes)


FORMATS = _formats()
"""By the names that GGUF files have for them."""
