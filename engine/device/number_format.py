"""The number formats that an engine computes in, by their names in settings."""

from typing import Literal

import torch

DtypeName = Literal["float32", "bfloat16", "float16"]

DTYPES: dict[DtypeName, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def find_dtype(name: DtypeName | Literal["auto"], device: torch.device) -> torch.dtype:
    """The number format of a setting; "auto" is bfloat16 where the device computes it natively, else float32."""
    if name != "auto":
        return DTYPES[name]
    if device.type == "cpu":
        is_native = torch.cpu._is_avx512_bf16_supported()
    else:
        is_native = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if is_native else torch.float32


def dtype_name(dtype: torch.dtype) -> DtypeName:
    """The setting that means this number format."""
    return next(name for name, known in DTYPES.items() if known == dtype)
