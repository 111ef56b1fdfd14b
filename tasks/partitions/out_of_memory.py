"""Memory that ran out: whether an error says so, and giving it back."""

import gc

from engine.errors import BatchloomError


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
