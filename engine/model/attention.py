"""The choice of an attention backend: C++ or torch on a CPU, Triton on a GPU."""

import logging
from typing import Any

import torch

from engine.config import EngineConfig
from engine.device.placement import dtype_name
from engine.errors import ConfigError
from engine.kernels.attention_backend import AttentionBackend
from engine.kernels.cpu.native import NativeBackend
from engine.kernels.cpu.native_build import NativeBuildError
from engine.kernels.cpu.torch_attention import CpuAttention
from engine.kv.kv_cache import KVShape
from engine.model.loading.checkpoint import cache_folder

LOGGER = logging.getLogger("batchloom.engine")


def make_attention(
    config: EngineConfig, device: torch.device, *, num_q_heads: int, kv_shape: KVShape, has_layers: bool
) -> AttentionBackend:
    """Makes the backend that the config names for a model and a device.

    Args:
        config: "auto" is "fused" on a GPU; on a CPU "native" if that supports the model and compiles, else "torch".
        has_layers: whether a backend's own layers can compute the model; some settings need them.
    Raises:
        ConfigError: the backend does not run on the device, or does not support the model.
    """
    name, dtype = config.attention, kv_shape.dtype
    heads = {"num_q_heads": num_q_heads, "num_kv_heads": kv_shape.num_kv_heads, "head_dim": kv_shape.head_dim}
    shape: dict[str, Any] = heads | {"block_size": config.block_size, "dtype": dtype}
    if dtype == torch.int8 or config.deterministic:
        from engine.model.other_attention import make_exact  # imported only when needed

        return make_exact(device, **shape, has_layers=has_layers)
    if name == "auto" and (device.type != "cpu" or dtype_name(dtype) == "fp8"):
        name = "fused"
    if name not in ("auto", "native", "torch"):
        from engine.model.other_attention import make_triton  # imported only when needed

        return make_triton(name, device=device, **shape, has_layers=has_layers)
    if device.type != "cpu":
        raise ConfigError(f"attention {name!r} runs on the CPU, not on {device}")
    if name != "torch":
        try:
            return NativeBackend(**shape, folder=cache_folder())
        except (ValueError, NativeBuildError) as error:
            if name == "native":
                raise ConfigError(f"attention 'native': {error}") from error
            LOGGER.warning("torch computes the layers, and the night takes about twice as long: %s", error)
    return CpuAttention(**heads, dtype=dtype)
