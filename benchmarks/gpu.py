"""The GPU of a measurement: which it is, its versions, its own ceilings, and how time is taken on it."""

import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton

from benchmarks.machine import commit


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRun:
    """Where a measurement was taken. Recorded with every result."""

    device: torch.device
    hardware: str
    versions: str
    commit: str
    num_processors: int

    @staticmethod
    def tolerance(dtype: torch.dtype) -> float:
        """Largest error against float64 that a result on standard normal inputs may have."""
        return {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 6e-2}[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What the device itself reaches in this run: a large copy, and a large bf16 matrix product on random data."""

    memory_gb_s: float
    matrix_tflops: float


def require_gpu(program: str) -> GpuRun:
    """The first GPU, or the end of the program: a figure for a GPU comes only from a GPU."""
    if not torch.cuda.is_available():
        sys.exit(
            f"{program}: no GPU is at hand, so nothing was measured. Run it on a machine with a CUDA or ROCm device."
        )
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    return GpuRun(
        device=device,
        hardware=properties.name,
        versions=f"torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}",
        commit=commit(),
        num_processors=properties.multi_processor_count,
    )


def median_us(call: Callable[[], object]) -> float:
    """Median device time of a call, the L2 cache emptied before each."""
    return 1000 * float(triton.testing.do_bench(call, warmup=50, rep=200, return_mode="median"))


def measure_ceilings(run: GpuRun) -> Ceilings:
    """Bandwidth of a copy of 4 GB (bytes read plus written) and the rate of an 8192-cubed bf16 product."""
    source = torch.randn(1 << 30, device=run.device)
    target = torch.empty_like(source)
    copy_us = median_us(lambda: target.copy_(source))
    memory_gb_s = 2 * source.nbytes / copy_us / 1e3
    # Free before the product: a smaller card must hold it too.
    source = target = torch.empty(0, device=run.device)
    left, right = (torch.randn(8192, 8192, device=run.device, dtype=torch.bfloat16) for _ in range(2))
    product_us = median_us(lambda: left @ right)
    return Ceilings(memory_gb_s=memory_gb_s, matrix_tflops=2 * 8192**3 / product_us / 1e6)
