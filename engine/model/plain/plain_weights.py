"""The weights of a plain model, read from its safetensors files as they are mapped into memory."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from engine.errors import ModelError
from engine.model.loading.checkpoint import GGUF_TENSORS
from engine.model.plain.plain_config import PlainConfig
from engine.model.plain.plain_model import PlainModel


def empty_model(config: PlainConfig, folder: Path, dtype: torch.dtype) -> PlainModel:
    """A checkpoint's model without memory for its weights, but with what turns positions into angles."""
    with torch.device("meta"):
        model = PlainModel(config)
        for parameter in model.parameters():
            parameter.data = torch.empty(parameter.shape, dtype=dtype)
    if (file := folder / "generation_config.json").is_file():
        eos = json.loads(file.read_bytes()).get("eos_token_id")
        model.generation_config.eos_token_id = config.eos_token_id if eos is None else eos
    return model.eval().requires_grad_(False)


def load_plain(
    folder: Path, config: PlainConfig, *, dtype: torch.dtype, device: torch.device
) -> tuple[PlainModel, bool]:
    """As `engine.model.loading.checkpoint.load_weights`, of a config that `read_plain_config` has read."""
    model = empty_model(config, folder, dtype)
    if (folder / GGUF_TENSORS).is_file():
        from engine.model.loading.gguf import unpack_gguf

        folder = unpack_gguf(folder)
    try:
        missing = _read(model, folder, device)
    except ModelError:
        raise
    except Exception as error:  # safetensors raises its own kinds for a damaged file
        raise ModelError(f"model {str(folder)!r}: the weights cannot be read: {error}") from error
    has_output_layer = missing != ["lm_head.weight"]
    if missing and has_output_layer:
        missing = sorted({*missing} - {"lm_head.weight"})
        raise ModelError(f"model {str(folder)!r}: its files lack {len(missing)} weights, {missing[0]} first")
    if not has_output_layer:
        model.lm_head.weight = model.model.embed_tokens.weight  # something that takes no memory; nobody reads it
    model.model.rotary_emb.to(device)
    return model, has_output_layer


def _read(model: PlainModel, folder: Path, device: torch.device) -> list[str]:
    """Puts tensors in the place of the model's parameters; returns the names of those that the files have not."""
    missing = []
    with ExitStack() as opened:
        files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = opened.enter_context(safe_open(path, framework="pt", device="cpu"))
            files |= dict.fromkeys(file.keys(), file)
        is_base = "norm.weight" in files  # of a model that was saved without an output layer
        for name, parameter in [*model.named_parameters()]:
            stored = name.removeprefix("model.") if is_base else name
            if stored not in files:
                missing.append(name)
                continue
            tensor = files[stored].get_tensor(stored)
            if tensor.shape != parameter.shape:
                shapes = f"{list(tensor.shape)}, expected {list(parameter.shape)}"
                raise ModelError(f"model {str(folder)!r}: the weight {stored} has the shape {shapes}")
            owner_name, _, leaf = name.rpartition(".")
            # A file stays mapped, with all that was read of it, while a tensor is used as it lies there; kernels copy
            # those of products.
            is_used = tensor.ndim == 1 or "embed_tokens" in name
            tensor = tensor.to(device, parameter.dtype, copy=is_used)
            setattr(model.get_submodule(owner_name), leaf, nn.Parameter(tensor, requires_grad=False))
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return missing
