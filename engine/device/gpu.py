"""Checks of a GPU: whether it exists, works, and which 8-bit floating-point format it computes."""

import os

import torch

from engine.errors import ConfigError

FORMATS = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
"""8-bit formats of AMD's architectures. NVIDIA GPUs have float8_e4m3fn from compute capability 8.9 on."""


def check_gpu(name: str) -> None:
    """Refuses a device that is of another kind or not here, see `engine.device.placement.check_device`."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is not known to torch; use cpu, cuda or auto") from error
    if device.type == "cpu":
        return
    if device.type != "cuda":
        raise ConfigError(f"device {name!r} is not supported; use cpu, cuda or auto")
    if not torch.cuda.is_available():
        raise ConfigError(f"device {name!r}: torch finds no GPU here; use cpu or auto")
    num_gpus = torch.cuda.device_count()
    if device.index is not None and device.index >= num_gpus:
        raise ConfigError(f"device {name!r}: torch finds {num_gpus} here, the last is 'cuda:{num_gpus - 1}'")


def has_failed() -> bool:
    """Whether this process cannot use its GPU any more, as after a kernel's access to an address that is not mapped.
    Then every call fails until the process ends, with errors of torch, cuBLAS or Triton."""
    try:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def find_fp8(device: torch.device) -> torch.dtype:
    """The device's 8-bit format with 4 exponent and 3 mantissa bits; `ConfigError` if it has none. A CPU has one where
    Triton's interpreter runs on it (TRITON_INTERPRET=1)."""
    if device.type == "cpu":
        found, name = torch.float8_e4m3fn if os.environ.get("TRITON_INTERPRET") == "1" else None, "this CPU"
    else:
        properties = torch.cuda.get_device_properties(device)
        name = properties.name
        if torch.version.hip is not None:
            found = FORMATS.get(properties.gcnArchName.split(":")[0])
        else:
            found = torch.float8_e4m3fn if (properties.major, properties.minor) >= (8, 9) else None
    if found is None:
        raise ConfigError(
            f"dtype 'fp8' is computed on NVIDIA GPUs from compute capability 8.9 on (L40S, H100) and AMD's MI300 and "
            f"MI350 series, not on {name}: set dtype to auto"
        )
    return found
