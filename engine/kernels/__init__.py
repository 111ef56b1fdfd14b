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


LARGEST_GROUP = 16
"""Query heads per KV head: they must fit the rows of the narrowest tile."""


def check_gpu_shape(*, num_q_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    """Raises `ValueError` if the Triton kernels do not support a model's heads or a KV block of so many tokens."""
    if num_q_heads % num_kv_heads or not 1 <= num_q_heads // num_kv_heads <= LARGEST_GROUP:
        raise ValueError(
            f"{num_q_heads} query heads for {num_kv_heads} KV heads: must be 1 to {LARGEST_GROUP} times as many"
        )
    for name, size in (("head_dim", head_dim), ("block_size", block_size)):
        if size % 8 or not 8 <= size <= 256:
            raise ValueError(f"{name} must be a multiple of 8 of at most 256, got {size}")
