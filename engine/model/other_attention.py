"""Attention backends for special cases: results that do not depend on the rest of the batch, and GPUs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from engine.errors import ConfigError
from engine.kernels.attention_backend import AttentionBackend
from engine.kernels.cpu.deterministic import DeterministicBackend
from engine.kernels.cpu.int8 import Int8Backend
from engine.kernels.cpu.native_build import NativeBuildError
from engine.model.loading.checkpoint import cache_folder


def make_exact(device: torch.device, *, dtype: torch.dtype, has_layers: bool, **shape: Any) -> AttentionBackend:
    """A backend whose results do not depend on the rest of the batch; in int8 they never do. See `make_attention`."""
    if dtype == torch.int8:
        with _refusing("dtype 'int8'"):
            if not has_layers:
                raise ValueError("the model's layers are not those of Llama, Mistral or Qwen")
            return Int8Backend(**shape, folder=cache_folder())
    if device.type != "cpu":
        raise ConfigError(f"deterministic: sums on a GPU depend on the batch; set device to cpu, got {device}")
    if not has_layers:
        raise ConfigError("deterministic: the layers are transformers' own, whose products depend on the batch")
    with _refusing("deterministic"):
        return DeterministicBackend(**shape, dtype=dtype, folder=cache_folder())


def make_triton(name: str, *, has_layers: bool, **shape: Any) -> AttentionBackend:
    """Makes "paged", "relay" or "fused". In fp8, products and KV are in 8 bits, and hidden states in bfloat16."""
    try:
        from engine.kernels.triton.layers.fp8 import FP8_DTYPES
        from engine.kernels.triton.relay import RelayAttention
        from engine.kernels.triton.triton_attention import PagedAttention, TritonAttention
    except ImportError as error:
        raise ConfigError(f"attention {name!r} needs Triton: {error}") from error
    if shape["dtype"] in FP8_DTYPES:
        if not has_layers:
            raise ConfigError("dtype 'fp8': the model's layers are not those of Llama, Mistral or Qwen")
        shape |= {"fp8": shape["dtype"], "dtype": torch.bfloat16}
    make: Any = {"paged": PagedAttention, "relay": RelayAttention, "fused": TritonAttention}[name]
    with _refusing(f"attention {name!r}"):
        return make(**shape)  # type: ignore[no-any-return]


@contextmanager
def _refusing(setting: str) -> Iterator[None]:
    """Raises `ConfigError` where the backend of a setting does not support a shape, or cannot be compiled."""
    try:
        yield
    except (ValueError, NativeBuildError) as error:
        raise ConfigError(f"{setting}: {error}") from error
