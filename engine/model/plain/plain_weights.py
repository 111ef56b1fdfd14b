"""Plain models, made without weights; and weights, read from safetensors files that are mapped into memory."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from engine.errors import ModelError
from engine.model.loading.checkpoint import GGUF_TENSORS
from engine.model.plain.plain_config import PlainConfig, read_plain_config
from engine.model.plain.plain_model import PlainModel


def make_skeleton(folder: Path, dtype: torch.dtype, change: Callable[[Any], Any] = lambda config: config) -> Any:
    """The model of a plain checkpoint without memory for its weights, but with what turns positions into angles.

    It is transformers' model where `read_plain_config` does not cover the configuration.

    Args:
        folder: the checkpoint's.
        dtype: of the weights.
        change: what is done to the configuration before.
    """
    if (config := read_plain_config(folder)) is not None:
        return empty_model(change(config), folder, dtype)
    from engine.model.loading.stock_weights import empty_stock_model, read_config  # seconds to import

    return empty_stock_model(change(read_config(folder)), folder, dtype)


def empty_model(config: PlainConfig, folder: Path, dtype: torch.dtype) -> PlainModel:
    """As `make_skeleton`, of a config that `read_plain_config` has read."""
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
    """As `engine.model.loading.stock_weights.load_weights`, of a config that `read_plain_config` has read."""
    model = empty_model(config, folder, dtype)
    if (folder / GGUF_TENSORS).is_file():
        from engine.model.loading.gguf import unpack_gguf

        folder = unpack_gguf(folder)
    missing = fill_in(model, folder, device)
    has_output_layer = "lm_head.weight" not in missing
    if missing := sorted({*missing} - {"lm_head.weight"}):
        raise ModelError(f"model {str(folder)!r}: its files lack {len(missing)} weights, {missing[0]} first")
    if not has_output_layer:
        model.lm_head.weight = model.model.embed_tokens.weight  # something that takes no memory; nobody reads it
    return model, has_output_layer


def fill_in(
    model: Any,
    folder: Path,
    device: torch.device,
    take: Callable[[Any, str, torch.Size], torch.Tensor] = lambda file, name, shape: file.get_tensor(name),
) -> list[str]:
    """Puts the tensors of a checkpoint in the place of a skeleton's parameters.

    Args:
        model: from `make_skeleton`; changed.
        folder: the checkpoint's.
        device: where all of the model goes.
        take: reads a tensor of an open file that is to have this shape.
    Returns:
        names of the parameters that the files have not.
    Raises:
        ModelError: a file is damaged, or a tensor has another shape.
    """
    missing = []
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = bool(model.config.tie_word_embeddings)
    try:
        with ExitStack() as opened:
            files: dict[str, Any] = {}
            for path in sorted(folder.glob("*.safetensors")):
                file = opened.enter_context(safe_open(path, framework="pt", device="cpu"))
                files |= dict.fromkeys(file.keys(), file)
            is_base = "norm.weight" in files  # of a model that was saved without an output layer
            for name, parameter in [*model.named_parameters()]:
                owner_name, _, leaf = name.rpartition(".")
                owner = model.get_submodule(owner_name)
                if owner is head and is_tied:
                    continue
                stored = name.removeprefix("model.") if is_base else name
                if stored not in files:
                    missing.append(name)
                    continue
                tensor = take(files[stored], stored, parameter.shape)
                if tensor.shape != parameter.shape:
                    shapes = f"{list(tensor.shape)}, expected {list(parameter.shape)}"
                    raise ModelError(f"model {str(folder)!r}: the weight {stored} has the shape {shapes}")
                # A file stays mapped, with all that was read of it, while a tensor is used as it lies there; kernels
                # copy those of products.
                tensor = tensor.to(device, parameter.dtype, copy=tensor.ndim == 1 or owner is embedding)
                setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False))
    except ModelError:
        raise
    except Exception as error:  # safetensors raises its own kinds for a damaged file
        raise ModelError(f"model {str(folder)!r}: the weights cannot be read: {error}") from error
    if is_tied:
        head.weight = embedding.weight
    model.get_decoder().rotary_emb.to(device)
    return missing
