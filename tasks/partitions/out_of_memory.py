"""Recovery from a lack of memory: detecting it, freeing memory, and going on with less."""

import gc
from dataclasses import replace

from engine.config import EngineConfig
from engine.errors import BatchloomError, OutOfMemoryError

MOST_HALVINGS = 4
"""How often memory is halved; after that, a lack of memory is a failure like any other."""

LEAST_BATCHED_TOKENS = 16
LEAST_KV_BYTES = 64 * 1024**2

SIGNS = ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED")
"""Parts of the messages of other errors: torch's on the host, the driver's (through torch or Triton), cuBLAS's."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory of device or host ran out. A budget that is too small for its work is not meant."""
    import torch

    if isinstance(error, BatchloomError):
        return isinstance(error, OutOfMemoryError)
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)
    )


def free_memory() -> None:
    """Free the memory of dropped models. Call it outside of the exception's handler, whose frames hold tensors."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def lower(config: EngineConfig, num_halvings: int) -> EngineConfig:
    """The settings with KV memory and tokens of a step halved `num_halvings` times, but not below the least."""
    tokens, kv_bytes = config.step_tokens, config.kv_memory_bytes
    tokens = max(min(tokens, LEAST_BATCHED_TOKENS), tokens >> num_halvings)
    if kv_bytes == "auto":
        fraction = config.memory_fraction / 2**num_halvings
        return replace(config, max_num_batched_tokens=tokens, memory_fraction=fraction)
    kv_bytes = max(min(kv_bytes, LEAST_KV_BYTES), kv_bytes >> num_halvings)
    return replace(config, max_num_batched_tokens=tokens, kv_memory_bytes=kv_bytes)


def can_lower(config: EngineConfig, num_halvings: int) -> bool:
    """Whether one more halving lowers the memory."""
    return num_halvings < MOST_HALVINGS and lower(config, num_halvings) != lower(config, num_halvings + 1)


def describe_memory(config: EngineConfig) -> str:
    """For a message."""
    kv_bytes = config.kv_memory_bytes
    memory = f"{config.memory_fraction:.1%} of the memory" if kv_bytes == "auto" else f"{kv_bytes:,} bytes"
    return f"{memory} for KV and {config.step_tokens:,} tokens in a step"
