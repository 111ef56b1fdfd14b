"""The attention backends whose results do not depend on the rest of the batch."""

from typing import Any

import torch

from engine.config import Attention
from engine.errors import ConfigError
from engine.kernels.attention_backend import AttentionBackend
from engine.kernels.cpu.deterministic import DeterministicBackend
from engine.kernels.cpu.int8 import Int8Backend
from engine.kernels.cpu.native_build import NativeBuildError
from engine.kv.kv_cache import KVShape
from engine.model.attention import make_attention
from engine.model.loading.checkpoint import cache_folder


def make_deterministic(
    name: Attention, *, num_q_heads: int, kv_shape: KVShape, block_size: int, device: torch.device, has_layers: bool
) -> AttentionBackend:
    """See `make_attention`; the backend's results do not depend on the rest of the batch (int8's never do). Raises
    `ConfigError` if that cannot be, or the kernels do not support the model."""
    shape: dict[str, Any] = {"num_q_heads": num_q_heads, "block_size": block_size, "has_layers": has_layers}
    if kv_shape.dtype == torch.int8:
        return make_attention(name, kv_shape=kv_shape, device=device, **shape)
    if device.type != "cpu":
        raise ConfigError(f"deterministic: sums on a GPU depend on the batch; set device to cpu, got {device}")
    if not has_layers:
        raise ConfigError("deterministic: the layers are transformers' own, whose products depend on the batch")
    shape |= {"num_kv_heads": kv_shape.num_kv_heads, "head_dim": kv_shape.head_dim, "dtype": kv_shape.dtype}
    try:
        backend = DeterministicBackend(**shape, folder=cache_folder())
    except (ValueError, NativeBuildError) as error:
        raise ConfigError(f"deterministic: {error}") from error
    if not backend.has_products:
        raise ConfigError("deterministic: this CPU has neither AMX nor AVX512-BF16 for bfloat16; set dtype to float32")
    return backend


def make_int8_attention(*, dtype: object, has_layers: bool, **shape: Any) -> AttentionBackend:
    """`make_attention` for int8. Raises `ConfigError` for models whose layers the int8 kernels do not support."""
    try:
        if not has_layers:
            raise ValueError("the model's layers are not those of Llama, Mistral or Qwen")
        return Int8Backend(**shape, folder=cache_folder())
    except (ValueError, NativeBuildError) as error:
        raise ConfigError(f"dtype 'int8': {error}") from error
