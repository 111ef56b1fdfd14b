"""The rates of this machine's device, measured in a second: a matrix product of the model's size, reading memory."""

import time
from collections.abc import Callable
from functools import cache, partial

import torch

from engine.device.free_memory import free_memory_bytes
from engine.device.placement import dtype_name, find_dtype
from engine.model.model_shape import ModelShape
from engine.simulation.device import Device, match_device

_NUM_ROWS = 512
_READ_BYTES = 256 * 1024**2
_MEASURE_SECONDS = 0.3


def probe_device(device: torch.device, shape: ModelShape, dtype: str) -> Device:
    """The table's entry for this GPU, if there is one; else the device measured in one number format, each rate once in
    a process. The efficiencies are assumptions.

    Those of a CPU, three quarters of a product's rate and 0.4 ms per layer, fit steps of SmolLM2-135M: prompts and
    answers, two and 32 at a time, in float32, bfloat16 and with quantized weights, on a Xeon with AMX. memory_bytes of
    a CPU is the memory that is free now within the cgroup's limit.

    Args:
        shape, dtype: the sizes of the measured products, and the name of their number format, as in torch.
    """
    is_cpu = device.type == "cpu"
    if not is_cpu:
        properties = torch.cuda.get_device_properties(device)
        if (known := match_device(properties.name, properties.total_memory)) is not None:
            return known
    kind = find_dtype("fp8", device) if dtype == "fp8" else getattr(torch, dtype)
    num_threads = torch.get_num_threads()
    title = f"this machine's CPU, {num_threads} threads"
    sizes = f"{_NUM_ROWS} x {shape.hidden_size} x {shape.intermediate_size}"
    # A CPU's own kernels are no slower than in float32 where torch has no fast product in a format (int8 without VNNI).
    rate = max(
        _measure_flops(device, num_threads, shape.hidden_size, shape.intermediate_size, each)
        for each in ({kind, torch.float32} if is_cpu else {kind})
    )
    return Device(
        name=device.type,
        title=title if is_cpu else torch.cuda.get_device_name(device),
        peak_flops={dtype: rate},
        peak_bytes_per_second=_measure_bandwidth(device, num_threads),
        memory_bytes=free_memory_bytes(device),
        compute_efficiency=0.75 if is_cpu else 0.9,
        memory_efficiency=0.9 if is_cpu else 0.85,
        host_s_per_layer=0.4e-3 if is_cpu else 0.2e-3,
        overlaps_host=not is_cpu,
        source=f"measured: products of {sizes}, sums of {_READ_BYTES >> 20} MiB",
    )


@cache
def _measure_flops(
    device: torch.device, num_threads: int, hidden_size: int, intermediate_size: int, dtype: torch.dtype
) -> float:
    """The rate of a feed-forward layer's first product: rows times weights ``[intermediate_size, hidden_size]`` as they
    are stored. A rate measured with fewer threads is not used again."""
    rows = torch.ones(_NUM_ROWS, hidden_size, device=device).to(dtype)
    weights = torch.ones(intermediate_size, hidden_size, device=device).to(dtype)
    num_flops = 2 * _NUM_ROWS * hidden_size * intermediate_size
    multiply = torch._int_mm if dtype == torch.int8 else torch.mm
    if dtype_name(dtype) == "fp8":
        one = torch.ones((), device=device)
        multiply = partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    return num_flops / best_seconds(lambda: multiply(rows, weights.T), device)


@cache
def _measure_bandwidth(device: torch.device, num_threads: int) -> float:
    values = torch.ones(_READ_BYTES // 4, dtype=torch.float32, device=device)
    return _READ_BYTES / best_seconds(values.sum, device)


def best_seconds(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of three or more runs, which other programs disturb the least."""
    seconds: list[float] = []
    work()  # first use allocates and chooses kernels
    _wait(device)
    while len(seconds) < 3 or sum(seconds) < _MEASURE_SECONDS:
        started = time.perf_counter()
        work()
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
