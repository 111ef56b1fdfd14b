"""Profiles the device's time: kernels by time, and the gaps between them."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

NUM_KERNELS = 15
LONG_GAP_US = 20.0

T = TypeVar("T")


def profiled(call: Callable[[], T]) -> tuple[dict[str, Any], T]:
    """The kernels and gaps of a call, and its result; without a GPU, the CPU's operators."""
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    with profile(activities=activities, acc_events=True) as profiler:
        result = call()
        if on_gpu:
            torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    intervals = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == device
    ]
    return summed(intervals), result


def summed(intervals: list[tuple[float, float, str]]) -> dict[str, Any]:
    """The sums of intervals (begin and end in microseconds, name), in any order."""
    if not intervals:
        raise ValueError("the profile has no kernel")
    by_name: dict[str, list[float]] = defaultdict(list)
    gaps: list[float] = []
    busy_until = min(begin for begin, _, _ in intervals)
    first = busy_until
    for begin, end, name in sorted(intervals):
        by_name[name].append(end - begin)
        if begin > busy_until:
            gaps.append(begin - busy_until)
        busy_until = max(busy_until, end)
    total_us = busy_until - first
    kernels = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:NUM_KERNELS]
    return {
        "total_ms": round(total_us / 1e3, 3),
        "idle_share": round(sum(gaps) / total_us, 4) if total_us else 0.0,
        "num_kernels": len(intervals),
        "num_long_gaps": sum(gap > LONG_GAP_US for gap in gaps),
        "longest_gap_us": round(max(gaps, default=0.0), 1),
        "kernels": [
            {"name": name[:120], "count": len(times), "ms": round(sum(times) / 1e3, 3)} for name, times in kernels
        ],
    }
