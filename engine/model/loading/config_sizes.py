"""Sizes of a decoder, from its config.json; no weights are needed, but their shapes can be checked."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.model.layer_counts import named_sizes, text_config_of
from engine.model.loading.checkpoint import GGUF_TENSORS, PLAIN_MODEL_TYPES, is_plain, read_json

VALUE_BYTES = {"fp8": 1, "int8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "quantized": 2}
_SCALE_BYTES = 2  # in an 8-bit KV cache, one per head and token


def read_sizes(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's values under transformers' usual names; its config class adds defaults for all models but those
    that are plain and say their KV heads, Qwen3 also a head's. Raises `ModelError` if config.json cannot be used."""
    values = config.get("text_config", config)
    if not isinstance(values, Mapping):
        raise ModelError(f"config.json: text_config must be an object, got {values!r}")
    needed = {"num_key_value_heads", "head_dim"} if values.get("model_type") == "qwen3" else {"num_key_value_heads"}
    if values.get("model_type") in PLAIN_MODEL_TYPES and needed <= values.keys():
        return values
    return values if (text_config := text_config_of(config)) is None else named_sizes(text_config)


def read_size(values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A size by its name in values of `read_sizes`, or the default where it is absent or null. Raises `ModelError` if
    it is not a positive integer. See `read_sizes`."""
    value = default if values.get(name) is None else values[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {name} must be a positive whole number, got {value!r}")
    return value


def read_head_dim(values: Mapping[str, Any]) -> int:
    """The size of a head, from values of `read_sizes`; raises as `read_size`."""
    return read_size(values, "head_dim", read_size(values, "hidden_size") // read_size(values, "num_attention_heads"))


def find_size(config: Mapping[str, Any], name: str) -> int:
    """A size of the text model in a config.json, or transformers' default, by its usual name; transformers, which takes
    seconds to import, is asked only where config.json has no such key. Raises `ModelError` where neither has one."""
    values = config.get("text_config", config)
    return read_size(values if isinstance(values, Mapping) and name in values else read_sizes(config), name)


_OUT, _UP = ("vocab_size", "hidden_size"), ("intermediate_size", "hidden_size")
_SHAPES = {
    **dict.fromkeys(("embed_tokens", "lm_head", "token_embd", "output"), _OUT),
    **dict.fromkeys(("gate_proj", "up_proj", "ffn_gate", "ffn_up"), _UP),
    **dict.fromkeys(("down_proj", "ffn_down"), _UP[::-1]),
    **dict.fromkeys(("q_proj", "attn_q"), ("num_attention_heads x head_dim", "hidden_size")),
    **dict.fromkeys(("k_proj", "v_proj", "attn_k", "attn_v"), ("num_key_value_heads x head_dim", "hidden_size")),
}
"""Sizes of a plain model's matrices, by their names in safetensors and in GGUF files."""


def check_shapes(folder: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Refuses a plain checkpoint whose matrices, by name, have other shapes than config.json says."""
    if not is_plain(config := read_json(folder / "config.json")) or "quantization_config" in config:
        return
    sizes = dict(read_sizes(config))
    num_q_heads, head_dim = read_size(sizes, "num_attention_heads"), read_head_dim(sizes)
    for name in ("num_attention_heads", "num_key_value_heads"):
        sizes[f"{name} x head_dim"] = read_size(sizes, name, num_q_heads) * head_dim
    if num_q_heads % read_size(sizes, "num_key_value_heads", num_q_heads):
        raise ModelError(f"model {str(folder)!r}: config.json: {num_q_heads} heads are no multiple of its KV heads")
    if (folder / GGUF_TENSORS).is_file():
        shapes = {name: tensor["shape"] for name, tensor in read_json(folder / GGUF_TENSORS)["tensors"].items()}
    for name, shape in shapes.items():
        *_, matrix, kind = ("", *name.split("."))
        if kind == "weight" and (named := _SHAPES.get(matrix)) and shape != [read_size(sizes, each) for each in named]:
            says = ", ".join(f"{each} {sizes[each]}" for each in named)
            raise ModelError(f"model {str(folder)!r}: config.json says {says}; the weight {name} has the shape {shape}")


def kv_bytes_per_layer(values: Mapping[str, Any], dtype: str) -> int:
    """KV bytes of a token in one layer, from values of `read_sizes` and the KV's dtype, a key of `VALUE_BYTES`."""
    num_kv_heads = read_size(values, "num_key_value_heads", read_size(values, "num_attention_heads"))
    return 2 * num_kv_heads * kv_head_bytes(read_head_dim(values), VALUE_BYTES[dtype])


def kv_head_bytes(head_dim: int, value_bytes: int) -> int:
    """Bytes of the key or value of one head and token."""
    return head_dim * value_bytes + (_SCALE_BYTES if value_bytes == 1 else 0)
