"""Whether a run is long enough to pay for torch.compile."""

import torch

from engine.config import Compile
from engine.kernels.cpu.native_build import find_compiler

TOKENS_THAT_PAY_FOR_COMPILING = 100_000
"""Prompt tokens to compute from which "auto" compiles: about a minute's work on two CPU cores."""


def should_compile(setting: Compile, dtype: torch.dtype, num_tokens: int) -> bool:
    """As `EngineConfig.compile` says, for a plan that computes num_tokens prompt tokens."""
    if setting != "auto":
        return setting == "always"
    return num_tokens >= TOKENS_THAT_PAY_FOR_COMPILING and dtype != torch.float32 and find_compiler() is not None
