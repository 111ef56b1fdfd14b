"""Which attention backend computes: native or torch on the CPU, Triton on a GPU."""

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch

from engine.config import Attention
from engine.errors import ConfigError
from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.cpu.native import NativeKernels
from engine.kernels.cpu.native_build import NativeBuildError
from engine.kernels.cpu.torch_attention import CpuAttention
from engine.kv.kv_cache import KVShape
from engine.model.checkpoint import cache_folder

LOGGER = logging.getLogger("batchloom.engine")


class AttentionBackend(Protocol):
    """What a kernel package offers the model: prepare once a step, then write and attend once a layer."""

    def prepare(self, batch: AttentionBatch) -> Any:
        """Whatever the layers of this step need, made once."""

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, work: Any
    ) -> None:
        """Writes ``[T, num_kv_heads, head_dim]`` keys and values into the step's slots of the caches."""

    def attend(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, work: Any, *, scale: float
    ) -> torch.Tensor:
        """``[T, num_q_heads, head_dim]`` in and out; this step's rows are in the caches already."""


def make_attention(
    name: Attention, *, num_q_heads: int, kv_shape: KVShape, block_size: int, device: torch.device
) -> AttentionBackend | NativeKernels:
    """The named backend for a model's shape on a device.

    Args:
        name: "native" (compiled C++, which computes the rest of a layer as well) and "torch" run on the CPU; "paged"
            (paged), "relay" (three launches) and "fused" (one launch) are Triton kernels. "auto" is "fused" on a GPU;
            on the CPU it is "native" where that can be had, else "torch".
    Raises:
        ConfigError: the backend does not run on the device, or does not cover the shape.
    """
    shape: dict[str, Any] = {
        "num_q_heads": num_q_heads,
        "num_kv_heads": kv_shape.num_kv_heads,
        "head_dim": kv_shape.head_dim,
        "dtype": kv_shape.dtype,
    }
    if name == "auto" and device.type != "cpu":
        name = "fused"
    if name in ("auto", "native", "torch"):
        if device.type != "cpu":
            raise ConfigError(f"attention {name!r} runs on the CPU, not on {device}")
        try:
            if name != "torch":
                return NativeKernels(**shape, block_size=block_size, folder=cache_folder())
        except (ValueError, NativeBuildError) as error:
            if name == "native":
                raise ConfigError(f"attention 'native': {error}") from error
            LOGGER.info("attention is computed by torch: %s", error)
        return CpuAttention(**shape)
    try:
        # Triton is not installed everywhere that the CPU path runs.
        from engine.kernels.triton.fused import FusedAttention
        from engine.kernels.triton.paged import PagedAttention
        from engine.kernels.triton.relay import RelayAttention
    except ImportError as error:
        raise ConfigError(f"attention {name!r} needs Triton: {error}") from error
    kernels: dict[str, Callable[..., AttentionBackend]] = {
        "paged": PagedAttention,
        "relay": RelayAttention,
        "fused": FusedAttention,
    }
    try:
        return kernels[name](**shape, block_size=block_size, device=device)
    except ValueError as error:
        raise ConfigError(f"attention {name!r}: {error}") from error
