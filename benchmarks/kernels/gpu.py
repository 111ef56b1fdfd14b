"""The GPU of a measurement: name, versions, its measured ceilings, and timing."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The device's own rates in this run: reading and writing large arrays, and a large bf16 matrix product."""

    memory_gb_s: float
    matrix_tflops: float


MOST_ERROR = {torch.float32: 2e-5, torch.bfloat16: 0.03}
"""By number format, the largest error of a right result of attention, as a share of its row's largest number. In bf16,
right results in Triton's interpreter are off by up to 0.009; without one block of 16 tokens of 2,065, by 0.08 or more.
A limit on the error itself would not do: the more tokens a row sees, the smaller are its numbers."""


def error_of(out: torch.Tensor, expected: torch.Tensor) -> tuple[float, bool]:
    """The largest error of attention, as a share of its row's largest number, and whether `MOST_ERROR` allows it.

    Args:
        out: ``[num_rows, num_q_heads, head_dim]``.
        expected: the same in float64.
    """
    error = float(((out.double() - expected).abs() / expected.abs().amax(dim=(1, 2), keepdim=True)).max())
    return error, error < MOST_ERROR[out.dtype]


def require_gpu(program: str) -> GpuRun:
    """The first GPU; ends the program if there is none."""
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
        us: median, with an empty L2 cache.
        not_captured: "", or why the call is no CUDA graph: then the time includes the host's time between launches.
    """

    us: float
    not_captured: str


def device_time(call: Callable[[], object], *, rep_ms: float = 200) -> DeviceTime:
    """The time of a call on the device, without the host if it can be captured; rep_ms is how long it is measured.

    Without a GPU, as in checks of the programs themselves, it is the time of one call on the host.
    """
    if not torch.cuda.is_available():
        started = time.perf_counter()
        call()
        return DeviceTime(us=(time.perf_counter() - started) * 1e6, not_captured="no GPU")
    timed, not_captured = captured(call)
    us = 1000 * float(triton.testing.do_bench(timed, warmup=rep_ms / 4, rep=rep_ms, return_mode="median"))
    return DeviceTime(us=us, not_captured=not_captured)


def graph_us(call: Callable[[], object]) -> float:
    """The time of a call within a CUDA graph, in microseconds; without a GPU, see `device_time`.

    Raises:
        RuntimeError: the call cannot be captured, so its time would contain the host's.
    """
    found = device_time(call)
    if found.not_captured and torch.cuda.is_available():
        raise RuntimeError(f"not captured in a CUDA graph: {found.not_captured}")
    return found.us


def captured(call: Callable[[], object]) -> tuple[Callable[[], object], str]:
    """A function that replays the call as one CUDA graph, and ""; or the call itself, and why it cannot be captured."""
    call()  # compiles, and sizes workspaces: neither can be captured
    try:
        graph = torch.cuda.CUDAGraph()
        # A failed capture leaves its own stream current; the outer context restores the stream.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            call()
    except Exception as failure:
        # The end of a failed capture raises, too, with a less useful message.
        return call, in_one_line(failure.__context__ or failure)
    return graph.replay, ""


def in_one_line(failure: BaseException) -> str:
    """The type of an error and the first line of its message."""
    return f"{type(failure).__name__}: {(str(failure).strip().splitlines() or [''])[0]}"


def measure_ceilings(run: GpuRun, *, is_tiny: bool) -> Ceilings:
    """Bandwidth (bytes read plus written) and the rate of a bf16 matrix product on random data.

    Within a CUDA graph a copy is no kernel and reaches two thirds of the kernels' bandwidth on an H200, so an array is
    negated into another instead. With is_tiny, arrays are small, and the rates mean nothing.
    """
    num_copied, matrix_size = (1 << 16, 64) if is_tiny else (1 << 30, 8192)
    source = torch.randn(num_copied, device=run.device)
    target = torch.empty_like(source)
    copy_us = graph_us(lambda: torch.neg(source, out=target))
    memory_gb_s = 2 * source.nbytes / copy_us / 1e3
    # Free the arrays before the product, for GPUs with less memory.
    source = target = torch.empty(0, device=run.device)
    left, right = (torch.randn(matrix_size, matrix_size, device=run.device, dtype=torch.bfloat16) for _ in range(2))
    product_us = graph_us(lambda: left @ right)
    return Ceilings(memory_gb_s=memory_gb_s, matrix_tflops=2 * matrix_size**3 / product_us / 1e6)
