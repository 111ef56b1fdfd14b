"""Explains why a tiny model's results differ from transformers': the first layer that differs, and the setting."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from engine.model.model import Model
from engine.model.proof.tiny_model import decoder_layers, make_tiny_model
from engine.model.proof.tiny_run import (
    MOST_ERROR,
    Difference,
    MakeEngine,
    as_request,
    find_difference,
    policies,
    prompts,
)
from engine.planning.prefix_groups import plan_prefix_groups

_SETTINGS = ("window", "chunk", "softcap", "scal", "multiplier", "rope", "bias", "norm", "temperature", "gate", "attn")
"""Parts of the names of settings that may change the computation."""


def explain(config: PretrainedConfig, make_engine: MakeEngine, found: Difference) -> str:
    """Names the first layer that differs, and a setting without which nothing does. See `find_difference`."""
    where = _where_it_differs(config, make_engine)
    reason = f"with {found.policy}, log-probabilities differ by up to {found.error:.2g}{where}"
    for name, value in config.to_dict().items():
        if any(part in name for part in _SETTINGS) and value and isinstance(value, bool | int | float):
            neutral = False if value is True else 1.0 if isinstance(value, float) and value != 1.0 else None
            for other in dict.fromkeys((neutral, None)):
                try:
                    without = type(config).from_dict(config.to_dict() | {name: other})
                    if find_difference(without, make_engine) is None:
                        if name == "sliding_window":  # whose value is a small one here
                            why = "remove it from config.json if the architecture ignores it"
                            return f"{reason}, but not without sliding_window: {why}"
                        return f"{reason}, but not with {name}={other} in place of {value}"
                except Exception:  # the class does not accept the value, or cannot compute with it
                    continue
    return reason


def _where_it_differs(config: PretrainedConfig, make_engine: MakeEngine) -> str:
    """The first layer whose output differs for one prompt, or that none does; nothing for batchloom's layers."""
    prompt = max(prompts(), key=len)
    reference, mine = make_tiny_model(config), make_tiny_model(config)
    with torch.inference_mode(), _keeping_outputs(reference) as expected:
        reference(torch.tensor([prompt]), use_cache=False)
    ours = Model(mine, device=torch.device("cpu"), owns_weights=False)
    made = make_engine(ours, policies(config)["whole prompts"])
    with _keeping_outputs(mine) as found:
        list(made.run_plan([as_request("alone", prompt)], plan_prefix_groups([prompt])))
    for layer, (theirs, own) in enumerate(zip(expected, found, strict=False)):
        if theirs.shape != own.shape or not torch.allclose(theirs, own, atol=MOST_ERROR, rtol=MOST_ERROR):
            return f"; layer {layer} is the first that differs"
    return "; it depends on the rest of the batch" if found else ""


@contextmanager
def _keeping_outputs(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Collects the outputs of the decoder layers within the block."""
    outputs: list[torch.Tensor] = []

    def keep(module: nn.Module, given: object, made: Any) -> None:
        outputs.append((made[0] if isinstance(made, tuple) else made).detach().clone())

    handles = [layer.register_forward_hook(keep) for layer in decoder_layers(model)]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
