"""The number of weights in the layers of any architecture that transformers knows, counted without loading them."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_OF_ONE_EXPERT = re.compile(r"experts\.\d+\.")


def text_config_of(values: Mapping[str, Any]) -> "PretrainedConfig | None":
    """The text model's config of a config.json, with transformers' defaults; None for an architecture that transformers
    does not know. Raises `ModelError` if transformers refuses the values."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if str(values.get("model_type")) not in CONFIG_MAPPING:
        return None
    try:
        config = AutoConfig.for_model(**values)
    except Exception as error:  # config classes raise errors of any kind
        raise ModelError(f"config.json cannot be used: {error}") from error
    text: PretrainedConfig = config.get_text_config(decoder=True)
    return text


def named_sizes(config: "PretrainedConfig") -> dict[str, Any]:
    """A config's values; those with a name of their own (n_embd of GPT-2) also under the usual name (hidden_size)."""
    values: dict[str, Any] = config.to_dict()
    return {name: values[own] for name, own in config.attribute_map.items() if own in values} | values


def count_layer_weights(config: "PretrainedConfig", num_experts: int) -> tuple[int, int]:
    """The number of weights in the matrices of all decoder layers: outside experts, and in all experts, of which a
    layer has num_experts. Raises `ModelError` if the layers cannot be made."""
    import torch
    from transformers import AutoModelForCausalLM

    from engine.model.proof.tiny_model import decoder_layers

    try:
        with torch.device("meta"):
            layers = decoder_layers(AutoModelForCausalLM.from_config(config))
    except Exception as error:  # as above
        raise ModelError(f"architecture {config.model_type!r}: its layers cannot be made: {error}") from error
    num_outside = num_of_experts = 0
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if "bias" in name or parameter.ndim < 2:
                continue
            if _OF_ONE_EXPERT.search(name) or (parameter.ndim == 3 and parameter.shape[0] == num_experts):
                num_of_experts += parameter.numel()
            else:
                num_outside += parameter.numel()
    return num_outside, num_of_experts
