"""Versions and rates of the machine."""

import shutil
import time
from typing import Any

import numpy as np
import torch

from benchmarks.first_light.host import decode_step_ms
from benchmarks.first_light.stage_run import StageRun
from benchmarks.kernels.gpu import device_time, graph_us, measure_ceilings
from engine.device.gpu import find_fp8
from engine.errors import ConfigError
from engine.kernels.triton.tuned import load_tuned


def run(stage: StageRun) -> None:
    stage.measure("packages", _packages)
    stage.measure("ceilings", lambda: measure_ceilings(stage.run, is_tiny=stage.is_tiny))
    stage.measure("fp8 matrix rate", lambda: fp8_tflops(stage))
    stage.measure("host of a decode step, ms", lambda: _host_ms(8 if stage.is_tiny else 512))
    stage.measure("launches", lambda: _launches(stage.run.device, 20 if stage.is_tiny else 1000))


def _packages() -> dict[str, Any]:
    found: dict[str, Any] = {"numpy": np.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found |= {"memory_bytes": properties.total_memory, "num_processors": properties.multi_processor_count}
    return found | {tool: shutil.which(tool) for tool in ("cc", "c++", "nvcc", "compute-sanitizer", "ncu")}


def fp8_tflops(stage: StageRun) -> float | str:
    """The rate of a product of two float8 matrices with one scale each, or why there is none."""
    device, size = stage.run.device, 64 if stage.is_tiny else 8192
    try:
        dtype = find_fp8(device)
    except ConfigError as error:
        return f"not measured: {error}"
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    one = torch.ones((), device=device)

    def product() -> torch.Tensor:
        return torch._scaled_mm(left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return 2 * size**3 / graph_us(product) / 1e6


def _host_ms(num_rows: int) -> dict[str, float]:
    """Milliseconds by part; work lists are cut for an H100 or H200, on any device."""
    tuned = load_tuned("sm_90", element_bits=16, head_dim=128)
    return {part: round(taken, 3) for part, taken in decode_step_ms(tuned, num_rows=num_rows).items()}


def _launches(device: torch.device, count: int) -> dict[str, float | str]:
    """Microseconds of the smallest operation: launched by the host, and within a CUDA graph."""
    values = torch.zeros(1, device=device)

    def launch_all() -> None:
        for _ in range(count):
            values.add_(1)

    launch_all()
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    launch_all()
    if device.type == "cuda":
        torch.cuda.synchronize()
    host_us = (time.perf_counter() - started) * 1e6 / count
    found = device_time(launch_all, rep_ms=50)
    return {"host_us": host_us, "graph_us": found.us / count, "not_captured": found.not_captured}
