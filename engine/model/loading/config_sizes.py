"""Sizes of a decoder, from its config.json; no weights are needed."""

from collections.abc import Mapping
from typing import Any

from engine.errors import ModelError
from engine.model.layer_counts import named_sizes, text_config_of
from engine.model.loading.checkpoint import PLAIN_MODEL_TYPES

VALUE_BYTES = {"fp8": 1, "int8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "quantized": 2}

_SCALE_BYTES = 2
"""Size of a scale in an 8-bit KV cache, which has one per head and token."""


def read_sizes(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's values under transformers' usual names.

    For architectures that are not plain, transformers' config class adds defaults and renames keys.
    Raises `ModelError` if config.json cannot be used.
    """
    values = config.get("text_config", config)
    if not isinstance(values, Mapping):
        raise ModelError(f"config.json: text_config must be an object, got {values!r}")
    if values.get("model_type") in (None, *PLAIN_MODEL_TYPES):
        return values
    text_config = text_config_of(config)
    return values if text_config is None else named_sizes(text_config)


def read_size(values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A size, which must be a positive integer; raises `ModelError` if it is not.

    Args:
        values: from `read_sizes`.
        name: of the size.
        default: if the size is absent or null; None: no default.
    """
    value = values.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {name} must be a positive whole number, got {value!r}")
    return value


def kv_bytes_per_layer(values: Mapping[str, Any], dtype: str) -> int:
    """KV bytes of a token in one layer, from values of `read_sizes` and the KV's dtype, a key of `VALUE_BYTES`."""
    num_q_heads = read_size(values, "num_attention_heads")
    head_dim = read_size(values, "head_dim", read_size(values, "hidden_size") // num_q_heads)
    return 2 * read_size(values, "num_key_value_heads", num_q_heads) * kv_head_bytes(head_dim, VALUE_BYTES[dtype])


def kv_head_bytes(head_dim: int, value_bytes: int) -> int:
    """Bytes of the key or value of one head and token."""
    return head_dim * value_bytes + (_SCALE_BYTES if value_bytes == 1 else 0)
