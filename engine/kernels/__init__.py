"""Kernels of decoder layers: C++ for CPUs, Triton for GPUs, torch references. They take tensors and block tables, and
do not know requests or schedules."""

from typing import Any, overload


@overload
def cdiv(dividend: int, divisor: int) -> int: ...
@overload
def cdiv(dividend: Any, divisor: Any) -> Any: ...
def cdiv(dividend: Any, divisor: Any) -> Any:
    """Division rounded up, of integers or integer arrays; the divisor is positive."""
    return -(-dividend // divisor)
