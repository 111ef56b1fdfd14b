"""Calls of the C++ kernels that layers call within one call."""

import ctypes

import torch

from engine.kernels.cpu.layer_structures import NativeWork
from engine.kernels.cpu.native import NativeBackend
from engine.kernels.cpu.native_build import address


def rms_norm(kernels: NativeBackend, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Divides each row of ``[T, n]`` by its root mean square, with epsilon added to the mean square, and multiplies it
    by the weight ``[n]``."""
    out = kernels.new_rows(*x.shape)
    kernels.kernel("rms_norm")(x.data_ptr(), weight.data_ptr(), out.data_ptr(), *x.shape, epsilon)
    return out


def rotate_and_write_kv(
    kernels: NativeBackend,
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    work: NativeWork,
    *,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    epsilon: float,
) -> None:
    """Norms query and key heads if norms are given, rotates them, all in place, and writes the step's KV.

    Args:
        qkv: ``[T, (num_q_heads + 2 * num_kv_heads) * head_dim]``, contiguous.
        cos, sin: float32 ``[T, head_dim]``, contiguous.
        q_norm, k_norm: ``[head_dim]``.
    """
    kernels.kernel("rotate_and_store")(
        *(*map(address, (qkv, cos, sin, q_norm, k_norm)), epsilon, k_cache.data_ptr(), v_cache.data_ptr()),
        *map(ctypes.byref, (kernels.structure, work)),
    )
