"""Whether a run is long enough to pay for torch.compile."""

import os
import shutil

import torch

from engine.config import Compile

TOKENS_THAT_PAY_FOR_COMPILING = 100_000
"""Prompt tokens to compute from which "auto" compiles: about a minute's work on two CPU cores."""


def pays_to_compile(setting: Compile, dtype: torch.dtype, num_tokens: int) -> bool:
    """As `EngineConfig.compile` says, for a plan that computes num_tokens prompt tokens."""
    if setting != "auto":
        return setting == "always"
    return num_tokens >= TOKENS_THAT_PAY_FOR_COMPILING and dtype != torch.float32 and _has_compiler()


def _has_compiler() -> bool:
    return shutil.which(os.environ.get("CXX", "g++")) is not None
