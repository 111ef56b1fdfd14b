"""torch.compile for layers that are torch modules, where a run is long enough to pay for the compilation."""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from engine.config import Compile
from engine.kernels.cpu.native_build import find_compiler
from engine.model.model import Model
from engine.model.plain.plain_model import Layer

LOGGER = logging.getLogger("batchloom.engine")

TOKENS_THAT_PAY_FOR_COMPILING = 100_000
"""Prompt tokens to compute from which "auto" compiles: about a minute's work on two CPU cores."""


def compile_if_long(model: Model, setting: Compile, num_tokens: int) -> None:
    """Compiles the model's torch layers if `setting` is "always", or if it is "auto" and the run's `num_tokens`, prompt
    tokens to compute, pay for it. See `EngineConfig`."""
    is_long = num_tokens >= TOKENS_THAT_PAY_FOR_COMPILING and model.dtype != torch.float32
    if setting == "always" or (setting == "auto" and is_long and bool(find_compiler())):
        compile_layers(model)


def compile_layers(model: Model) -> None:
    """Fuses the elementwise operations between the layers' products, at the next forward. All layers share one
    compilation, for any number of rows, which takes about ten seconds."""
    if not model.is_compiled:
        for layer in model.base.layers:
            if isinstance(layer, Layer):
                layer.self_attn.attend = torch.compiler.disable(layer.self_attn.attend)  # type: ignore
            layer.compile(dynamic=True)
        model.is_compiled = True


def compute_compiled(model: Model, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The last hidden states; if the compiler fails, computes this and all later steps without compiled layers.

    A compiler that is installed but broken must not fail the run. KV that was already written is written again.
    """
    from torch._dynamo.exc import TorchDynamoException  # seconds to import

    try:
        return model.base(**inputs).last_hidden_state  # type: ignore[no-any-return]
    except TorchDynamoException as error:
        LOGGER.warning("going on without compiled layers: %s", str(error).strip().splitlines()[0])
    for layer in model.base.layers:
        layer._compiled_call_impl = None  # undoes Module.compile, which has no public inverse
    model.is_compiled = False
    return model.base(**inputs).last_hidden_state  # type: ignore[no-any-return]
