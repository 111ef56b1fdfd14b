"""The folder of a LoRA adapter in peft's file format; adapters that are more than LoRA are refused by name."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.model.loading.checkpoint import read_json, weight_sample

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

_NOT_COVERED = {
    "use_dora": "DoRA",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "modules_to_save": "modules that are trained in full (modules_to_save)",
    "trainable_token_indices": "trained embeddings (trainable_token_indices)",
    "target_parameters": "parameters that are no linear layers (target_parameters)",
    "layer_replication": "repeated layers (layer_replication)",
    "lora_bias": "biases of the low-rank products (lora_bias)",
    "fan_in_fan_out": "transposed weights (fan_in_fan_out)",
    "alora_invocation_tokens": "activation by a token (aLoRA)",
    "arrow_config": "routing between adapters (Arrow)",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
}
"""Settings of adapter_config.json that, if set, make an adapter more than low-rank updates of linear layers."""

_BASE_KEEPING_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` with which training does not change the base weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The absolute path of a LoRA adapter (Hu et al. 2021); a sha256 over its settings and samples of weights."""

    folder: str
    digest: str

    @classmethod
    def find(cls, folder: str | Path) -> "Adapter":
        """Checks and identifies the adapter in a folder; weights are sampled, not read. Raises `ModelError` if a file
        is missing or unreadable, or the kind of adapter is not supported."""
        folder = Path(os.path.expanduser(folder)).absolute()
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (folder / name).is_file():
                raise ModelError(f"adapter {str(folder)!r}: the folder holds no {name}")
        refuse_uncovered(read_json(folder / CONFIG_FILE), folder)
        digest = hashlib.sha256((folder / CONFIG_FILE).read_bytes() + b"\0")
        weights = folder / WEIGHTS_FILE
        digest.update(f"{weights.stat().st_size}\0".encode() + weight_sample(weights))
        return cls(folder=str(folder), digest=digest.hexdigest())

    def verify(self) -> None:
        """Raises `ModelError` if the folder has changed since `find`, or differs on this host."""
        if Adapter.find(self.folder) != self:
            raise ModelError(f"adapter {self.folder!r} is not the one with which the run began")


def check_type(adapter: object) -> None:
    """Raises `ModelError` for anything but an `Adapter`."""
    if not isinstance(adapter, Adapter):
        raise ModelError(f"adapter must be an Adapter, as Adapter.find(folder) makes, got {adapter!r}")


def refuse_uncovered(config: Mapping[str, Any], folder: Path) -> None:
    """Raises `ModelError` if an adapter with this config is more than low-rank updates of linear layers."""
    if (kind := config.get("peft_type")) != "LORA":
        raise ModelError(f"adapter {str(folder)!r}: it is of type {kind!r}, only LORA is supported")
    reasons = [why for name, why in _NOT_COVERED.items() if config.get(name)]
    if config.get("bias", "none") != "none":
        reasons.append(f"trained biases (bias={config['bias']!r})")
    if (start := config.get("init_lora_weights")) not in _BASE_KEEPING_STARTS:
        reasons.append(f"a changed base (init_lora_weights={start!r}); convert it with peft's save_pretrained first")
    if reasons:
        raise ModelError(f"adapter {str(folder)!r}: {', '.join(reasons)} not supported")


@lru_cache(maxsize=64)
def check_adapter(adapter: Adapter, checkpoint: Path) -> None:
    """Reads the adapter and compares its shapes with those of a checkpoint's model, whose weights are not read. Raises
    `ModelError`, which names adapter and target, if a target module does not exist or has another shape."""
    from engine.model.adapters.lora import empty_model, find_updates

    find_updates(adapter, empty_model(checkpoint))
