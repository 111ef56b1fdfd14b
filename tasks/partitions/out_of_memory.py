"""Memory that ran out: whether an error says so, giving it back, and going on with less."""

import gc
from dataclasses import replace

from engine.config import EngineConfig
from engine.errors import BatchloomError

MOST_HALVINGS = 4
"""How often memory is halved before a lack of it is a failure as any other."""

LEAST_BATCHED_TOKENS = 16
LEAST_KV_BYTES = 64 * 1024**2


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory of device or host ran out, as opposed to a budget that is too small by its own arithmetic."""
    import torch

    if isinstance(error, BatchloomError):
        return False
    # On the host, torch raises a plain RuntimeError.
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def free_memory() -> None:
    """Give back what dropped models held; call it outside of the exception's handler, which holds its frames."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def lower(config: EngineConfig, num_halvings: int) -> EngineConfig:
    """The settings with KV memory and chunk size halved so often, but not below what is worth halving."""
    tokens, kv_bytes = config.step_tokens, config.kv_memory_bytes
    tokens = max(min(tokens, LEAST_BATCHED_TOKENS), tokens >> num_halvings)
    if kv_bytes == "auto":
        fraction = config.memory_fraction / 2**num_halvings
        return replace(config, max_num_batched_tokens=tokens, memory_fraction=fraction)
    kv_bytes = max(min(kv_bytes, LEAST_KV_BYTES), kv_bytes >> num_halvings)
    return replace(config, max_num_batched_tokens=tokens, kv_memory_bytes=kv_bytes)


def can_lower(config: EngineConfig, num_halvings: int) -> bool:
    """Whether one halving more leaves less memory."""
    return num_halvings < MOST_HALVINGS and lower(config, num_halvings) != lower(config, num_halvings + 1)


def describe_memory(config: EngineConfig) -> str:
    """For a message."""
    kv_bytes = config.kv_memory_bytes
    memory = f"{config.memory_fraction:.1%} of the memory" if kv_bytes == "auto" else f"{kv_bytes:,} bytes"
    return f"{memory} for KV and {config.step_tokens:,} tokens in a step"
