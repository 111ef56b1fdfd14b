"""Which attention backend computes: torch on the CPU, Triton on a GPU. All serve one interface."""

from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch

from engine.errors import ConfigError
from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.cpu import CpuAttention
from engine.kv_cache import KVShape

AttentionName = Literal["auto", "torch", "plain", "relay", "fused"]


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
    name: AttentionName, *, num_q_heads: int, kv_shape: KVShape, block_size: int, device: torch.device
) -> AttentionBackend:
    """The named backend for a model's shape on a device.

    Args:
        name: "torch" runs on the CPU; "plain" (paged), "relay" (three launches) and "fused" (one launch) are Triton
            kernels; "auto" is "torch" on the CPU and "fused" elsewhere.
    Raises:
        ConfigError: the backend does not run on the device, or does not cover the shape.
    """
    if name == "auto":
        name = "torch" if device.type == "cpu" else "fused"
    shape: dict[str, Any] = {
        "num_q_heads": num_q_heads,
        "num_kv_heads": kv_shape.num_kv_heads,
        "head_dim": kv_shape.head_dim,
        "dtype": kv_shape.dtype,
    }
    if name == "torch":
        if device.type != "cpu":
            raise ConfigError(f"attention 'torch' runs on the CPU, not on {device}")
        return CpuAttention(**shape)
    try:
        # Triton is not installed everywhere that the CPU path runs.
        from engine.kernels.fused import FusedAttention
        from engine.kernels.paged import PagedAttention
        from engine.kernels.relay import RelayAttention
    except ImportError as error:
        raise ConfigError(f"attention {name!r} needs Triton: {error}") from error
    kernels: dict[str, Callable[..., AttentionBackend]] = {
        "plain": PagedAttention,
        "relay": RelayAttention,
        "fused": FusedAttention,
    }
    try:
        return kernels[name](**shape, block_size=block_size, device=device)
    except ValueError as error:
        raise ConfigError(f"attention {name!r}: {error}") from error
