"""config.json of Llama, Mistral and Qwen models, read as their transformers classes read it.

What is not sure is left to them, and a test holds all that is read here to theirs.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engine.model.loading.checkpoint import is_plain

_NEEDED = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "eos_token_id"),
)
"""Classes differ in what they take for these where a file has none."""

_OPTIONAL = {"tie_word_embeddings": False, "attention_bias": False, "sliding_window": None, "head_dim": None}

_OF_QWEN = frozenset(["layer_types", "max_window_layers", "use_sliding_window"])
_READ_BELOW = _OF_QWEN | {"hidden_act", "mlp_bias", "rope_parameters", "rope_theta", "rope_scaling"}

_WITHOUT_EFFECT = frozenset(
    [
        *("architectures", "attention_dropout", "dtype", "torch_dtype", "initializer_range"),
        *("pretraining_tp", "transformers_version", "transformers.js_config", "use_cache", "id2label", "label2id"),
        *("is_llama_config", "rope_interleaved", "use_mrope"),
    ]
)
"""On the answers; so have the ids of other special tokens, and keys that begin with an underscore."""

_ROPE = {
    "default": {"rope_type", "rope_theta"},
    "llama3": {
        *("rope_type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    },
}
"""The parameters of each way to turn positions into angles that `Rotation` computes."""


class PlainConfig(SimpleNamespace):
    """The values of `_NEEDED` and `_OPTIONAL`, and ``rope_parameters``, by transformers' names."""

    def get_text_config(self, decoder: bool = True) -> "PlainConfig":
        """Itself; as transformers' configs, of which some have several parts."""
        return self

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def read_plain_config(folder: Path) -> PlainConfig | None:
    """The config of a checkpoint folder; None where anything in it is not covered, or not there."""
    try:
        values = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):  # the other reader says what is wrong
        return None
    if not isinstance(values, dict) or not is_plain(values) or any(name not in values for name in _NEEDED):
        return None
    known = {*_NEEDED, *_OPTIONAL, *_READ_BELOW, *_WITHOUT_EFFECT}
    if any(key not in known and not key.endswith("_token_id") and key[0] != "_" for key in values):
        return None
    kind = values["model_type"]
    config = PlainConfig(**{name: values[name] for name in _NEEDED})
    vars(config).update({name: values.get(name, default) for name, default in _OPTIONAL.items()})
    config.rope_parameters = _read_rope(values)
    # Where a file has none of these, each class has its own idea of it.
    if config.rope_parameters is None or (not config.head_dim and (kind == "qwen3" or "head_dim" in values)):
        return None
    if kind == "mistral" and ("sliding_window" not in values or values.keys() & _OF_QWEN):
        return None
    if (kind == "llama" and config.sliding_window) or (kind in ("mistral", "qwen2") and config.attention_bias):
        return None
    if values.get("use_sliding_window") or {*(values.get("layer_types") or ())} - {"full_attention"}:
        return None
    config.sliding_window = config.sliding_window if kind == "mistral" else None
    config.head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    return config


def _read_rope(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """In the form of version 5: one object, where version 4 had rope_theta beside rope_scaling."""
    rope = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if "rope_theta" in values:
        rope.setdefault("rope_theta", values["rope_theta"])
    return rope if rope.keys() == _ROPE.get(rope["rope_type"]) else None
