"""The attention backend of int8, which computes all of a model or nothing."""

from typing import Any

from engine.errors import ConfigError
from engine.kernels.attention_backend import AttentionBackend
from engine.kernels.cpu.int8 import Int8Backend
from engine.kernels.cpu.native_build import NativeBuildError
from engine.model.checkpoint import cache_folder


def make_int8_attention(*, dtype: object, has_layers: bool, **shape: Any) -> AttentionBackend:
    """See `engine.model.attention.make_attention`; raises `ConfigError` where the model is not covered."""
    try:
        if not has_layers:
            raise ValueError("the model's layers are not those of Llama, Mistral or Qwen")
        return Int8Backend(**shape, folder=cache_folder())
    except (ValueError, NativeBuildError) as error:
        raise ConfigError(f"dtype 'int8': {error}") from error
