"""Sizes of a decoder, read from its config.json; no weights are needed."""

from collections.abc import Mapping
from typing import Any

from engine.errors import ModelError
from engine.model.loading.checkpoint import PLAIN_MODEL_TYPES

VALUE_BYTES = {"fp8": 1, "int8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "quantized": 2}

_SCALE_BYTES = 2
"""In 8-bit formats, of the scale of a token's head in the KV cache."""


def read_sizes(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's values under the names that transformers uses for most architectures.

    Of architectures other than those of the backends' own layers, transformers' class completes and names them.
    Raises `ModelError` where config.json has no such values.
    """
    values = config.get("text_config", config)
    if not isinstance(values, Mapping):
        raise ModelError(f"config.json: text_config must be an object, got {values!r}")
    if values.get("model_type") in (None, *PLAIN_MODEL_TYPES):
        return values
    from engine.model.layer_counts import named_sizes, text_config_of

    text_config = text_config_of(config)
    return values if text_config is None else named_sizes(text_config)


def read_size(values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A positive whole number; raises `ModelError` for anything else.

    Args:
        values: from `read_sizes`.
        name: of the size.
        default: where it is absent or null; None for none.
    """
    value = values.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {name} must be a positive whole number, got {value!r}")
    return value


def kv_bytes_per_layer(values: Mapping[str, Any], dtype: str) -> int:
    """Bytes of a token's KV in one layer, given values of `read_sizes` and the KV's dtype as torch names it."""
    num_q_heads = read_size(values, "num_attention_heads")
    head_dim = read_size(values, "head_dim", read_size(values, "hidden_size") // num_q_heads)
    return 2 * read_size(values, "num_key_value_heads", num_q_heads) * kv_head_bytes(head_dim, VALUE_BYTES[dtype])


def kv_head_bytes(head_dim: int, value_bytes: int) -> int:
    """Bytes of a head's key, or value, of one token."""
    return head_dim * value_bytes + (_SCALE_BYTES if value_bytes == 1 else 0)
