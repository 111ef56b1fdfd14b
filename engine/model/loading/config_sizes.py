"""Sizes of a decoder, from its config.json, and with them the names and shapes of a plain model's weights."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.model.layer_counts import named_sizes, text_config_of
from engine.model.loading.checkpoint import GGUF_TENSORS, PLAIN_MODEL_TYPES, check_layers, is_plain, read_json

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
    """A size, which must be a positive integer; raises `ModelError` if it is not.

    Args:
        values, name: values of `read_sizes`, and a name in them.
        default: if the size is absent or null; None: no default.
    """
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


_Q, _KV, _DIM = "num_attention_heads x head_dim", "num_key_value_heads x head_dim", "hidden_size"
_LAYER: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), (_DIM,)),
    **{f"self_attn.{name}_proj.weight": (size, _DIM) for name, size in (("q", _Q), ("k", _KV), ("v", _KV))},
    "self_attn.o_proj.weight": (_DIM, _Q),
    **dict.fromkeys(("mlp.gate_proj.weight", "mlp.up_proj.weight"), ("intermediate_size", _DIM)),
    "mlp.down_proj.weight": (_DIM, "intermediate_size"),
}
"""Weights that each layer of a plain model has, and their sizes."""


def check_weight_files(folder: Path) -> None:
    """Refuses a checkpoint whose files are damaged, or have other layers than config.json says; that of a plain model
    also if they lack a weight, or one has another shape, or is a bias or a norm that is not computed."""
    stored = check_layers(folder)
    if not is_plain(config := read_json(folder / "config.json")) or "quantization_config" in config:
        return
    sizes = dict(read_sizes(config))
    num_q_heads, sizes["head_dim"] = read_size(sizes, "num_attention_heads"), read_head_dim(sizes)
    for name in ("num_attention_heads", "num_key_value_heads"):
        sizes[f"{name} x head_dim"] = read_size(sizes, name, num_q_heads) * sizes["head_dim"]
    if is_gguf := (folder / GGUF_TENSORS).is_file():
        stored = {name: tensor["shape"] for name, tensor in read_json(folder / GGUF_TENSORS)["tensors"].items()}
    expected = _name_weights(sizes, stored, is_gguf)
    is_other = any(stored.get(name) != [sizes.get(each) for each in expected[name]] for name in expected)
    if sizes[_Q] % sizes[_KV] or is_other or stored.keys() - expected.keys():
        from engine.model.loading.other_weights import refuse_other  # imported only when needed

        refuse_other(folder, sizes, stored, expected)


def _name_weights(sizes: Mapping[str, Any], stored: Collection[str], is_gguf: bool) -> dict[str, tuple[str, ...]]:
    """The weights that a plain model's files must have, and names of their sizes; an output layer that is `stored`."""
    kind, layer = sizes["model_type"], dict(_LAYER)
    for name in {"qwen2": "qkv", "mistral": ""}.get(kind, "qkvo" if sizes.get("attention_bias") else ""):
        layer[f"self_attn.{name}_proj.bias"] = layer[f"self_attn.{name}_proj.weight"][:1]
    if kind == "qwen3":
        layer |= dict.fromkeys(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), ("head_dim",))
    tables = dict.fromkeys(("embed_tokens.weight", "lm_head.weight"), ("vocab_size", _DIM))
    found: dict[str, tuple[str, ...]] = {**tables, "norm.weight": (_DIM,)}
    found |= {f"layers.{i}.{name}": layer[name] for i in range(read_size(sizes, "num_hidden_layers")) for name in layer}
    if is_gguf:
        from engine.model.loading.gguf_names import rename  # imported only when needed

        found = rename(found)
    elif "norm.weight" not in stored or "model.norm.weight" in stored:  # else it is saved without its output layer
        found = {name if name == "lm_head.weight" else f"model.{name}": found[name] for name in found}
    table, head, *_ = found
    if head not in stored:
        del found[head]
    elif table not in stored and sizes.get("tie_word_embeddings"):
        del found[table]
    return found


def kv_bytes_per_layer(values: Mapping[str, Any], dtype: str) -> int:
    """KV bytes of a token in one layer, from values of `read_sizes` and the KV's dtype, a key of `VALUE_BYTES`."""
    num_kv_heads = read_size(values, "num_key_value_heads", read_size(values, "num_attention_heads"))
    return 2 * num_kv_heads * kv_head_bytes(read_head_dim(values), VALUE_BYTES[dtype])


def kv_head_bytes(head_dim: int, value_bytes: int) -> int:
    """Bytes of the key or value of one head and token."""
    return head_dim * value_bytes + (_SCALE_BYTES if value_bytes == 1 else 0)
