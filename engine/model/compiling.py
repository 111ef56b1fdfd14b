"""transformers' own layers under torch.compile, where a run is long enough to pay for the compilation."""

import logging

import torch

from engine.config import Compile
from engine.kernels.cpu.native_build import find_compiler
from engine.model.model import Model

LOGGER = logging.getLogger("batchloom.engine")

TOKENS_THAT_PAY_FOR_COMPILING = 100_000
"""Prompt tokens to compute from which "auto" compiles: about a minute's work on two CPU cores."""


def compile_if_long(model: Model, setting: Compile, num_tokens: int) -> None:
    """Compiles the layers for a run that is long enough, or where the setting asks for it.

    Args:
        model: with transformers' own layers.
        setting: as `EngineConfig.compile` says.
        num_tokens: prompt tokens to compute.
    """
    is_long = num_tokens >= TOKENS_THAT_PAY_FOR_COMPILING and model.dtype != torch.float32
    if setting == "always" or (setting == "auto" and is_long and find_compiler() is not None):
        compile_layers(model)


def compile_layers(model: Model) -> None:
    """Has torch.compile fuse the elementwise work between the layers' products, at the next forward.

    All layers share the code, for any number of rows: one compilation of some ten seconds.
    """
    if not model.is_compiled:
        for layer in model.base.layers:
            layer.compile(dynamic=True)
        model.is_compiled = True


def decompile(model: Model, error: Exception) -> None:
    """The opposite of `compile_layers`: a compiler that is installed but broken must not cost the night."""
    LOGGER.warning("going on without compiled layers: %s", str(error).strip().splitlines()[0])
    for layer in model.base.layers:
        layer._compiled_call_impl = None  # what Module.compile sets; it has no public opposite
    model.is_compiled = False
