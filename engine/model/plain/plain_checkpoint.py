"""Reads config.json and weights of Llama, Mistral and Qwen models without transformers.

A config with anything unknown in it is left to transformers; tests compare what is read here with transformers.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from engine.errors import ModelError
from engine.model.loading.checkpoint import GGUF_TENSORS, SIZES, is_plain, read_end_tokens, read_json, weight_files
from engine.model.loading.config_sizes import check_weight_files
from engine.model.plain.plain_model import PlainConfig, PlainModel

_NEEDED = (*SIZES, "model_type", "rms_norm_eps", "eos_token_id")
"""Keys whose defaults differ between transformers' classes."""

_OPTIONAL = {"tie_word_embeddings": False, "attention_bias": False, "sliding_window": None, "head_dim": None}

_OF_QWEN = frozenset(["layer_types", "max_window_layers", "use_sliding_window"])
_READ_BELOW = _OF_QWEN | {"hidden_act", "mlp_bias", "rope_parameters", "rope_theta", "rope_scaling"}

_IGNORED = (
    *("architectures", "attention_dropout", "dtype", "torch_dtype", "initializer_range"),
    *("pretraining_tp", "transformers_version", "transformers.js_config", "use_cache", "id2label", "label2id"),
    *("is_llama_config", "rope_interleaved", "use_mrope"),
)
"""Keys that do not change answers; nor do ids of special tokens, and keys that begin with an underscore."""

_ROPE = {"default": (), "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}
"""The types of rotary embeddings that `Rotation` computes, and their parameters beside `rope_theta`."""


def read_plain_config(folder: Path) -> PlainConfig | None:
    """The config of a checkpoint folder; None if a key of it is unknown, missing, or has a value not supported here.
    Raises `ModelError` if config.json cannot be read, or its `eos_token_id` holds no token ids."""
    values = read_json(folder / "config.json")
    known = {*_NEEDED, *_OPTIONAL, *_READ_BELOW, *_IGNORED}
    unknown = [key for key in values if key not in known and not key.endswith("_token_id") and not key.startswith("_")]
    if not is_plain(values) or unknown or not values.keys() >= {*_NEEDED}:
        return None
    sizes = [*map(values.get, SIZES), values.get("head_dim") or 1, values.get("sliding_window") or 1]
    if not all(type(size) is int and size > 0 for size in sizes) or not isinstance(values["rms_norm_eps"], float):
        return None
    read_end_tokens(folder, "config.json")
    kind = values["model_type"]
    config = PlainConfig(**{name: values.get(name, _OPTIONAL.get(name)) for name in (*_NEEDED, *_OPTIONAL)})
    config.rope_parameters = _read_rope(values)
    # transformers' classes differ in their defaults for these.
    if config.rope_parameters is None or (not config.head_dim and (kind == "qwen3" or "head_dim" in values)):
        return None
    if kind == "mistral" and ("sliding_window" not in values or values.keys() & _OF_QWEN):
        return None
    if (kind == "llama" and config.sliding_window) or (kind in ("mistral", "qwen2") and config.attention_bias):
        return None
    is_full = values.get("layer_types") in (None, ["full_attention"] * config.num_hidden_layers)
    if values.get("use_sliding_window") or not is_full:
        return None
    config.sliding_window = config.sliding_window if kind == "mistral" else None
    config.head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    return config


def _read_rope(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """The rotary parameters in transformers 5's form, one object; None if a file has version 4's form, too."""
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(rope, dict) or (values.get("rope_parameters") and values.get("rope_scaling")):
        return None
    rope = {"rope_type": rope.get("type", "default"), **{key: rope[key] for key in rope if key != "type"}}
    if "rope_theta" in values:
        rope.setdefault("rope_theta", values["rope_theta"])
    is_numeric = all(isinstance(rope[key], (int, float)) for key in rope if key != "rope_type")
    names = _ROPE.get(str(rope["rope_type"]))
    return rope if is_numeric and names is not None and rope.keys() == {"rope_type", "rope_theta", *names} else None


def empty_model(config: PlainConfig, folder: Path, dtype: torch.dtype) -> PlainModel:
    """See `engine.model.plain.skeleton.make_skeleton`; with a config from `read_plain_config`."""
    with torch.device("meta"):
        model = PlainModel(config)
        for parameter in model.parameters():
            parameter.data = torch.empty(parameter.shape, dtype=dtype)
    model.generation_config.eos_token_id = read_end_tokens(folder)
    return model.eval().requires_grad_(False)


def load_plain(
    folder: Path, config: PlainConfig, *, dtype: torch.dtype, device: torch.device
) -> tuple[PlainModel, bool]:
    """See `engine.model.loading.stock_weights.load_weights`; with a config from `read_plain_config`."""
    model = empty_model(config, folder, dtype)
    if (folder / GGUF_TENSORS).is_file():
        from engine.model.loading.gguf import unpack_gguf

        folder = unpack_gguf(folder)
    if not (has_head := fill_model(model, folder, device)):
        model.lm_head.weight = model.model.embed_tokens.weight  # never read; takes no memory of its own
    return model, has_head


def fill_model(
    model: Any,
    folder: Path,
    device: torch.device,
    take: Callable[[Any, str, torch.Size], torch.Tensor] = lambda file, name, shape: file.get_tensor(name),
) -> bool:
    """Reads a plain checkpoint's weights into a model on the meta device; returns whether it has an output layer.
    Raises `ModelError` as `check_weight_files`, or if a tensor has one byte a value.

    Args:
        model: from `empty_model` or `empty_stock_model`; changed.
        take: reads a tensor of this name and shape from an open file.
    """
    check_weight_files(folder)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = bool(model.config.tie_word_embeddings)
    try:
        with ExitStack() as opened:
            files: dict[str, Any] = {}
            for path in weight_files(folder):
                file = opened.enter_context(safe_open(path, framework="pt", device="cpu"))
                files |= dict.fromkeys(file.keys(), file)
            for name, parameter in [*model.named_parameters(remove_duplicate=False)]:
                owner_name, _, leaf = name.rpartition(".")
                owner, names = model.get_submodule(owner_name), [name, name.removeprefix("model.")]
                names += ["lm_head.weight"] if owner is embedding else []
                if (stored := next((each for each in names if each in files), None)) is None:
                    continue  # an output layer that is the embedding, or that the files lack
                tensor = take(files[stored], stored, parameter.shape)
                if tensor.dtype.itemsize == 1:
                    raise TypeError(f"the weight {stored} is {tensor.dtype}, without its scale")
                # A file's pages stay mapped while any of its tensors is in use. Kernels copy matrices; copy the others.
                tensor = tensor.to(device, parameter.dtype, copy=tensor.ndim == 1 or owner is embedding)
                setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False))
    except Exception as error:  # safetensors raises errors of any kind for a damaged file
        raise ModelError(f"model {str(folder)!r}: the weights cannot be read: {error}") from error
    # As in transformers, files with another output layer than the embeddings take precedence over config.json.
    if is_tied and (head.weight.is_meta or torch.equal(head.weight, embedding.weight)):
        head.weight = embedding.weight
    model.get_decoder().rotary_emb.to(device)
    return is_tied or not head.weight.is_meta
