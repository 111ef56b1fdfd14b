"""Attention kernels: C++ for CPUs, Triton for GPUs, and torch twins of both. They know tensors and block tables, no
requests or schedules."""

from typing import Any, overload


@overload
def cdiv(dividend: int, divisor: int) -> int: ...
@overload
def cdiv(dividend: Any, divisor: Any) -> Any: ...
def cdiv(dividend: Any, divisor: Any) -> Any:
    """Division rounded up, of whole numbers or of integer arrays; the divisor is positive."""
    return -(-dividend // divisor)
