"""The GPU of a measurement: which it is, its versions, its own ceilings, and how time is taken on it."""

import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton

from benchmarks.measuring.machine import commit


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
    """What the device itself reaches in this run: reading and writing large arrays, and a large bf16 matrix product."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTime:
    """How long one call takes.

    Attributes:
        us: the median, the L2 cache emptied before each.
        not_captured: "", or why the call is no CUDA graph: then its time contains what the host takes between launches.
    """

    us: float
    not_captured: str


def device_time(call: Callable[[], object], *, rep_ms: float = 200) -> DeviceTime:
    """The time of a call on the device alone where it can be captured; rep_ms is how long it is measured.

    Without a GPU, where only checks of the programs themselves get to, it is one call's time on the host.
    """
    if not torch.cuda.is_available():
        started = time.perf_counter()
        call()
        return DeviceTime(us=(time.perf_counter() - started) * 1e6, not_captured="no GPU")
    timed, not_captured = captured(call)
    us = 1000 * float(triton.testing.do_bench(timed, warmup=rep_ms / 4, rep=rep_ms, return_mode="median"))
    return DeviceTime(us=us, not_captured=not_captured)


def captured(call: Callable[[], object]) -> tuple[Callable[[], object], str]:
    """What launches all of a call at once, and ""; or the call itself, and why it cannot be captured."""
    call()  # compiles, and sizes workspaces: neither can be captured
    try:
        graph = torch.cuda.CUDAGraph()
        # A capture that fails leaves its own stream the current one; the outer context brings this one back.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            call()
    except Exception as failure:
        # The end of a failed capture fails as well, and says less.
        return call, in_one_line(failure.__context__ or failure)
    return graph.replay, ""


def in_one_line(failure: BaseException) -> str:
    """What kind of failure it is, and the first line of what it says."""
    return f"{type(failure).__name__}: {(str(failure).strip().splitlines() or [''])[0]}"


def measure_ceilings(run: GpuRun, *, num_copied: int = 1 << 30, matrix_size: int = 8192) -> Ceilings:
    """Bandwidth (bytes read plus written) and the rate of a bf16 matrix product on random data.

    Within a CUDA graph a copy is no kernel: an H200 copied with two thirds of the bandwidth that kernels reach. So an
    array is negated into another.

    Args:
        num_copied: float32 numbers of each array.
        matrix_size: rows and columns of each matrix.
    """
    source = torch.randn(num_copied, device=run.device)
    target = torch.empty_like(source)
    copy_us = device_time(lambda: torch.neg(source, out=target)).us
    memory_gb_s = 2 * source.nbytes / copy_us / 1e3
    # Free before the product: a smaller card must hold it too.
    source = target = torch.empty(0, device=run.device)
    left, right = (torch.randn(matrix_size, matrix_size, device=run.device, dtype=torch.bfloat16) for _ in range(2))
    product_us = device_time(lambda: left @ right).us
    return Ceilings(memory_gb_s=memory_gb_s, matrix_tflops=2 * matrix_size**3 / product_us / 1e6)
