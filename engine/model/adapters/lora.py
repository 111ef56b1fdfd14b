"""Reads the low-rank updates of a LoRA adapter (Hu et al. 2021, section 4.1) and merges them into a model's weights."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from engine.errors import ModelError
from engine.model.adapters.adapter import CONFIG_FILE, WEIGHTS_FILE, Adapter, check_type
from engine.model.loading.checkpoint import read_json
from engine.model.loading.stock_weights import read_config

_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")

Base = list[tuple[nn.Linear, nn.Parameter]]
"""Linear layers and their base weights, which `restore` puts back."""


@dataclass(frozen=True, slots=True)
class Update:
    """The update of a linear layer's weights: ``scale * b @ a``, for a ``[rank, depth]`` and b ``[columns, rank]``. The
    scale is lora_alpha / rank, or lora_alpha / sqrt(rank) for rank-stabilised LoRA."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the updated weights."""
        return self.b.shape[0], self.a.shape[1]

    def added_to(self, weight: torch.Tensor) -> torch.Tensor:
        """The updated weights, a new tensor in the dtype of `weight`, computed in float32 and rounded once."""
        a, b = (factor.to(weight.device, torch.float32) for factor in (self.a, self.b))
        return torch.addmm(weight.float(), b, a, alpha=self.scale).to(weight.dtype)


def find_updates(adapter: Adapter, model: transformers.PreTrainedModel) -> dict[str, Update]:
    """An adapter's updates by the names of their modules in `model`. Raises `ModelError` as `read_updates`, or if a
    module does not exist, is not a linear layer of the model's body, or has another shape."""
    updates, made_for = read_updates(adapter)
    head, found = model.get_output_embeddings(), {}
    for name, update in updates.items():
        place, module = _find_module(model, name)
        target = f"adapter {adapter.folder!r}: {name}"
        if module is None:
            raise ModelError(f"{target}: the model has no such module{made_for}")
        if module is head or not isinstance(module, nn.Linear):
            kind = "the output layer" if module is head else f"a {type(module).__name__}"
            raise ModelError(f"{target}: {kind} is not supported, only linear layers of the model's body are")
        if (shape := tuple(module.weight.shape)) != update.shape:
            raise ModelError(f"{target}: an update of {update.shape} weights, the model has {shape}{made_for}")
        found[place] = update
    return found


def read_updates(adapter: Adapter) -> tuple[dict[str, Update], str]:
    """An adapter's updates in host memory by the module names in its file, and the end of a message: the model that it
    was made for. Raises `ModelError` if it is no `Adapter`, or its file is damaged, has tensors that are not factors of
    linear layers, or lacks a factor."""
    check_type(adapter)
    adapter.verify()
    folder, who = Path(adapter.folder), f"adapter {adapter.folder!r}"
    config = read_json(folder / CONFIG_FILE)
    try:
        tensors = load_file(folder / WEIGHTS_FILE)
    except Exception as error:  # safetensors raises errors of any kind for a damaged file
        raise ModelError(f"{who}: {WEIGHTS_FILE} cannot be read: {error}") from error
    factors: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found = _TENSOR.fullmatch(name)
        if found is None or tensor.dim() != 2:
            kind = "embeddings and output layers are" if re.search("embed|head", name) else "such a tensor is"
            raise ModelError(f"{who}: {name}: {kind} not supported")
        factors.setdefault(found[1], {})[found[2]] = tensor
    updates = {}
    for name, pair in factors.items():
        if set(pair) != {"A", "B"} or pair["A"].shape[0] != pair["B"].shape[1]:
            shapes = {kind: tuple(factor.shape) for kind, factor in sorted(pair.items())}
            raise ModelError(f"{who}: {name}: factors of one rank are missing, got {shapes}")
        try:
            rank = int(_value_for(name, config, "rank_pattern", "r"))
            alpha = _value_for(name, config, "alpha_pattern", "lora_alpha")
        except (AttributeError, TypeError, ValueError, re.error) as error:
            raise ModelError(f"{who}: {name}: adapter_config.json gives no rank or no alpha: {error}") from error
        if rank != pair["A"].shape[0]:
            raise ModelError(f"{who}: {name}: rank {pair['A'].shape[0]}, adapter_config.json says {rank}")
        updates[name] = Update(pair["A"], pair["B"], alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
    if not updates:
        raise ModelError(f"{who}: {WEIGHTS_FILE} holds no LoRA weights")
    base_name = str(config.get("base_model_name_or_path") or "")
    return updates, f", it was made for {base_name!r}" if base_name else ""


def merge(root: nn.Module, updates: Mapping[str, Update], prefix: str = "") -> Base:
    """Replaces the weights of linear layers by updated ones; the base weights are not overwritten. Returns the argument
    of `restore`.

    Args:
        root: a model, or a part of it.
        updates: from `find_updates`.
        prefix: of the names in `updates` that belong to `root`.
    """
    base: Base = []
    for name, update in updates.items():
        if name.startswith(prefix):
            linear = root.get_submodule(name[len(prefix) :])
            assert isinstance(linear, nn.Linear), "find_updates returns only linear layers"
            weight = linear.weight
            assert isinstance(weight, nn.Parameter), "transformers' weights are parameters"
            base.append((linear, weight))
            linear.weight = nn.Parameter(update.added_to(weight), requires_grad=False)
    return base


def restore(base: Base) -> None:
    """Puts back the weights that linear layers had before `merge`."""
    for linear, weight in base:
        linear.weight = weight


def empty_model(checkpoint: Path) -> transformers.PreTrainedModel:
    """The model of a checkpoint on the meta device."""
    config = read_config(checkpoint)
    is_causal = any(name.endswith("ForCausalLM") for name in config.architectures or ())
    kind = transformers.AutoModelForCausalLM if is_causal else transformers.AutoModel
    with torch.device("meta"):
        made: transformers.PreTrainedModel = kind.from_config(config)
    return made


def _value_for(name: str, config: Mapping[str, Any], patterns: str, default: str) -> float:
    """A module's rank or alpha: of the first pattern that matches the end of its name, else the default."""
    for pattern, value in (config.get(patterns) or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", name):
            return float(value)
    return float(config.get(default, 8))


def _find_module(model: transformers.PreTrainedModel, name: str) -> tuple[str, nn.Module | None]:
    """The module and its name in `model`, which may have another prefix: with or without a head or an image tower."""
    modules = dict(model.named_modules())
    prefix = model.base_model_prefix
    names = [name, f"{prefix}.{name}", name.removeprefix(f"{prefix}."), name.removeprefix("model.")]
    for place in (*names, *(name.replace("language_model.", "", 1) for name in names)):
        if place in modules:
            return place, modules[place]
    return name, None
