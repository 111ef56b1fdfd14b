"""Makes a tiny random model with the class and the settings of a large one; only its sizes are smaller."""

import math
import re
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from engine.errors import ModelError

VOCAB_SIZE = 160
WINDOW = 24
"""Positions of a shrunk window: shorter than the prompts of the proof."""

MOST_EXPERTS = 16
SMALLEST = 64
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_WINDOW_NAME = re.compile("window|chunk|local|span")
_NO_WINDOW_NAME = re.compile("layer|pattern|expert|experts|theta|freq|feed")


def shrink(config: PretrainedConfig) -> PretrainedConfig:
    """A config with the same settings and smaller sizes: layers, but one of each kind, heads, experts, tokens, windows.
    Head dims, query heads per KV head, positions, rotary embeddings, caps and scales do not change. Raises `ModelError`
    if the sizes cannot be read, or a small model does not have all kinds of layers of the large one."""
    try:
        kinds = layer_kinds(config)
    except Exception as error:  # config classes raise errors of any kind
        raise ModelError(f"architecture {config.model_type!r}: its layers cannot be made: {error}") from error
    num_layers = max(2, max(kinds.index(kind) for kind in set(kinds)) + 1)
    values = config.to_dict() | {
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": num_layers,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        "dtype": "float32",
    }
    values.update(_head_sizes(config))
    for name, value in values.items():
        if isinstance(value, list | tuple) and len(value) == config.num_hidden_layers:
            values[name] = list(value)[:num_layers]
        elif isinstance(value, int) and not isinstance(value, bool):
            values[name] = _shrunk(name, value, config)
    for name in ("quantization_config", "transformers_version", "architectures", "auto_map", "_name_or_path"):
        values.pop(name, None)
    try:
        tiny = type(config).from_dict(values)
        missing = set(kinds) - set(layer_kinds(tiny))
    except Exception as error:
        raise ModelError(
            f"architecture {config.model_type!r}: no small model of it can be made to compare: {error}"
        ) from error
    if missing:
        raise ModelError(f"architecture {config.model_type!r}: a small model of it has other layers")
    return tiny


def make_tiny_model(config: PretrainedConfig) -> PreTrainedModel:
    """A float32 model of a shrunk config; all weights, norms and biases included, are random from a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.3)
                else:
                    parameter.normal_(std=1.0 if "embed" in name else parameter.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = None
    made: PreTrainedModel = model
    return made


def layer_kinds(config: PretrainedConfig) -> list[frozenset[Any]]:
    """What distinguishes each layer: its modules, and the flags and names in their settings; takes no weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return [_kind_of(layer) for layer in decoder_layers(model)]


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers of a causal LM, in order."""
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return list(module)
    raise ModelError(f"architecture {model.config.model_type!r}: no list of {num_layers} decoder layers in it")


def _kind_of(layer: nn.Module) -> frozenset[Any]:
    return frozenset(
        (re.sub(r"\d+", "#", name), type(module).__name__, *sorted(_flags(module)))
        for name, module in layer.named_modules()
    )


def _flags(module: nn.Module) -> list[tuple[str, str]]:
    """A module's attributes: the values of flags and names, the types of all others."""
    return [
        (name, repr(value) if value is None or isinstance(value, bool | str) else type(value).__name__)
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in ("training", "config")
    ]


def _head_sizes(config: PretrainedConfig) -> dict[str, int]:
    num_heads = int(config.num_attention_heads)
    num_kv_heads = int(getattr(config, "num_key_value_heads", None) or num_heads)
    group_size = num_heads // num_kv_heads
    own_head_dim = config.to_dict().get("head_dim")
    # Without a head_dim the hidden size is that of all heads: two KV heads with many query heads would make it large.
    num_tiny_kv_heads = min(num_kv_heads, 2 if own_head_dim or group_size <= 4 else 1)
    sizes = {"num_attention_heads": num_tiny_kv_heads * group_size}
    if "num_key_value_heads" in config.to_dict():
        sizes["num_key_value_heads"] = num_tiny_kv_heads
    hidden_size = sizes["num_attention_heads"] * (own_head_dim or config.hidden_size // num_heads)
    if own_head_dim and hidden_size > 4 * SMALLEST:
        unit = math.lcm(32, sizes["num_attention_heads"])
        hidden_size = unit * math.ceil(SMALLEST / unit)
    return sizes | {"hidden_size": hidden_size}


def _shrunk(name: str, value: int, config: PretrainedConfig) -> int:
    if name.endswith("intermediate_size"):
        return min(value, SMALLEST)
    if name in _EXPERTS:
        return min(value, MOST_EXPERTS)
    is_window = _WINDOW_NAME.search(name) and not _NO_WINDOW_NAME.search(name)
    if is_window and WINDOW < value < (getattr(config, "max_position_embeddings", None) or math.inf):
        return WINDOW
    return value
