"""Where an engine computes: the device, its number format, its threads.

torch takes seconds to import, so each function imports it when needed: "auto" and "cpu" are checked without it.
"""

import ctypes
from typing import TYPE_CHECKING

from engine.config import Dtype
from engine.cores import usable_threads
from engine.errors import ConfigError

if TYPE_CHECKING:
    import torch


def check_device(name: str) -> None:
    """Raises `ConfigError` if the device is neither a CPU nor a GPU that torch finds here; done before any work."""
    if name not in ("auto", "cpu"):
        from engine.device.gpu import check_gpu

        check_gpu(name)


def resolve_device(name: str) -> "torch.device":
    """The device of a setting; "auto" is the first GPU, else the CPU. Raises as `check_device`."""
    import torch

    check_device(name)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def use_device(device: "torch.device") -> "torch.device":
    """Makes a GPU the current device of this thread, for kernels, graphs and events. Returns it with its number;
    without one it is the device that is current now."""
    import torch

    if device.type != "cuda":
        return device
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def use_threads(num_threads: int) -> None:
    """Sets torch's number of CPU threads, see `usable_threads`; 0: torch decides."""
    if num_threads:
        import torch

        torch.set_num_threads(usable_threads(num_threads))


def find_dtype(name: Dtype, device: "torch.device") -> "torch.dtype":
    """The number format of a setting; "auto" is bfloat16 where the device computes it natively, else float32. Raises
    `ConfigError` if the device does not compute the format."""
    import torch

    if name == "int8" and device.type != "cpu":
        raise ConfigError(f"dtype 'int8' is computed on a CPU, not on {device}: set device to cpu, or another dtype")
    if name == "fp8":
        from engine.device.gpu import find_fp8  # imported only when needed

        return find_fp8(device)
    if name == "quantized":
        kinds = "GGUF files and checkpoints of compressed-tensors, AWQ or GPTQ, without an adapter"
        raise ConfigError(f"dtype 'quantized' is for {kinds}")
    if name != "auto":
        found: torch.dtype = getattr(torch, name)
        return found
    if device.type == "cpu":
        is_native = torch.cpu._is_avx512_bf16_supported()
    else:
        is_native = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if is_native else torch.float32


def dtype_name(dtype: "torch.dtype") -> Dtype:
    """The setting that stands for a number format."""
    name: Dtype = str(dtype).removeprefix("torch.")  # type: ignore[assignment]
    return "fp8" if name.startswith("float8") else name


def give_back_freed_memory() -> None:
    """Returns the free pages of every thread's heap to the system; does nothing where the C library is not glibc.

    glibc keeps freed memory for the thread that freed it, and the threads that read weights have ended.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
