"""Makes a Triton backend by its name."""

from typing import TYPE_CHECKING, Any

import torch

from engine.errors import ConfigError

if TYPE_CHECKING:  # Triton may not be installed
    from engine.kernels.triton.triton_attention import TritonAttention


def make_triton_attention(name: str, **arguments: Any) -> "TritonAttention":
    """Makes the backend "paged", "relay" or "fused", with the arguments of `TritonAttention`. With an fp8 dtype,
    products and KV are in fp8 and hidden states in bfloat16. Raises `ConfigError` if Triton is not installed, or the
    shape or device is not supported."""
    try:
        from engine.kernels.triton.fused import FusedAttention, PagedAttention
        from engine.kernels.triton.layers.fp8 import FP8_DTYPES
        from engine.kernels.triton.relay import RelayAttention
    except ImportError as error:
        raise ConfigError(f"attention {name!r} needs Triton: {error}") from error
    if arguments["dtype"] in FP8_DTYPES:
        if not arguments["has_layers"]:
            raise ConfigError("dtype 'fp8': the model's layers are not those of Llama, Mistral or Qwen")
        arguments |= {"fp8": arguments["dtype"], "dtype": torch.bfloat16}
    backends: dict[str, type[TritonAttention]] = {
        "paged": PagedAttention,
        "relay": RelayAttention,
        "fused": FusedAttention,
    }
    try:
        return backends[name](**arguments)
    except ValueError as error:
        raise ConfigError(f"attention {name!r}: {error}") from error
