"""Reads configurations and weights with transformers, for models that are not plain."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.quantizers import AutoHfQuantizer

from engine.errors import ModelError
from engine.model.loading.checkpoint import check_layers, weight_shapes
from engine.model.loading.gguf import unpack_gguf
from engine.model.loading.other_weights import refuse_missing, refuse_unread

_HEAD = re.compile(r"lm_head|embed_out|unembed|^(head|output)\.")
"""Names of the weights of output layers, in the files of all architectures."""

_SCALE = re.compile(r"(weight|_proj)_scale(_inv|_2)?$|\.(scales|qweight|qzeros)$")
"""Names of tensors that belong to quantized weights."""


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Disables progress bars within the block: transformers' own switch leaves that of GGUF files."""
    begin = tqdm.__init__
    tqdm.__init__ = partialmethod(begin, disable=True)
    try:
        yield
    finally:
        tqdm.__init__ = begin


def read_config(folder: Path) -> transformers.PretrainedConfig:
    """A checkpoint's configuration; `ModelError` if transformers does not know architecture or rotary embedding."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # config classes raise errors of any kind
        raise ModelError(f"model {str(folder)!r}: config.json cannot be used: {error}") from error
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {each.get("rope_type") or "default" for each in (rope, *rope.values()) if isinstance(each, dict)}
    if unknown := sorted(kinds - {"default", *ROPE_INIT_FUNCTIONS}):
        known = ", ".join(sorted(ROPE_INIT_FUNCTIONS))
        raise ModelError(f"model {str(folder)!r}: config.json: rope_type {unknown[0]!r} is not one of default, {known}")
    return config


def has_output_layer(folder: Path) -> bool:
    """Whether a checkpoint that is not plain has an output layer, which its embeddings may be."""
    config = read_config(folder)
    configs, names = (config, config.get_text_config(decoder=True)), weight_shapes(folder)
    is_tied = any(getattr(each, "tie_word_embeddings", False) for each in configs)
    return is_tied or not names or any(map(_HEAD.search, names))


def empty_stock_model(
    config: transformers.PretrainedConfig, folder: Path, dtype: torch.dtype
) -> transformers.PreTrainedModel:
    """A checkpoint's model by its `config`, or one rank's share, with weights on the meta device, but with rotary
    frequencies; its folder's generation_config.json is read. See `read_config`."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    base = model.get_decoder()
    base.rotary_emb = type(base.rotary_emb)(base.config)
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model.eval().requires_grad_(False)


def convert_weights(model: transformers.PreTrainedModel, dtype: torch.dtype, why_not: str) -> None:
    """Converts weights to `dtype`, but not buffers, since rotary frequencies are float32 in every format. Raises
    `ModelError` if weights are quantized.

    Args:
        why_not: the beginning of that error.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.dtype.itemsize == 1:
            raise ModelError(f"{why_not}: {name} is {parameter.dtype}")
        parameter.data = parameter.data.to(dtype)


def load_weights(
    folder: Path, config: transformers.PretrainedConfig, *, dtype: torch.dtype, device: torch.device
) -> tuple[transformers.PreTrainedModel, bool]:
    """Reads a checkpoint's weights onto a device; also returns whether it has an output layer, which embedding models
    and classifiers do not need. Raises `ModelError` if a file is damaged, weights are missing, which transformers would
    initialise randomly, or they are quantized in a way that transformers does not know, or does not unpack while it
    reads them. See `read_config`, which reads `config`."""
    folder = unpack_gguf(folder)
    check_layers(folder)
    quantization = getattr(config, "quantization_config", None)
    loaded, missing_keys = read_pretrained(AutoModelForCausalLM, folder, config, dtype=dtype, device=device)
    if quantization is not None:
        method = f"model {str(folder)!r}: the weights are quantized by {quantization.get('quant_method')!r}, which"
        if not AutoHfQuantizer.supports_quant_method(quantization):
            raise ModelError(f"{method} transformers does not know")
        convert_weights(loaded, dtype, f"{method} is not computed")  # transformers has unpacked them, to any type
    # A file's pages stay mapped while any of its tensors is in use. Kernels copy matrices; copy the other tensors here.
    embedding = loaded.get_input_embeddings().weight
    for parameter in (each for each in loaded.parameters() if each.ndim == 1 or each is embedding):
        parameter.data = parameter.data.clone()
    head = loaded.get_output_embeddings()
    names = [name for name, module in loaded.named_modules() if module is head]
    refuse_missing(missing_keys - {f"{name}.{part}" for name in names for part in ("weight", "bias")}, folder)
    return loaded, not missing_keys


def read_pretrained(
    kind: Any, folder: Path, config: transformers.PretrainedConfig, *, dtype: torch.dtype, device: torch.device
) -> tuple[Any, set[str]]:
    """A model with a checkpoint's weights on a device, and the names of the weights that its files lack. Raises
    `ModelError` if a file is damaged, a weight has another shape than by config.json, or weights are quantized and it
    does not say so; or as `refuse_unread`.

    Args:
        kind: an "auto" class of transformers.
        config: from `read_config`.
    """
    how = {"dtype": dtype, "use_safetensors": True, "local_files_only": True, "output_loading_info": True}
    how |= {"ignore_mismatched_sizes": True}  # they are refused below, by name
    how |= {"adapter_kwargs": {"subfolder": "-"}}  # else peft, where installed, applies an adapter beside the weights
    try:
        with no_progress_bars(), device:
            loaded, info = kind.from_pretrained(folder, config=config, **how)
    except Exception as error:  # safetensors and torch raise errors of any kind for a damaged file
        raise ModelError(f"model {str(folder)!r}: the weights cannot be read: {error}") from error
    if info["mismatched_keys"]:
        name, found, expected = min(info["mismatched_keys"])
        shapes = f"{list(found)}, by config.json {list(expected)}"
        raise ModelError(f"model {str(folder)!r}: the weight {name} has the shape {shapes}")
    if not hasattr(config, "quantization_config") and (scales := [*filter(_SCALE.search, info["unexpected_keys"])]):
        why = f"its files have {min(scales)}, as of quantized weights; config.json has no quantization_config"
        raise ModelError(f"model {str(folder)!r}: {why}")
    refuse_unread(folder, info["unexpected_keys"], dict(loaded.named_parameters(remove_duplicate=False)))
    return loaded, set(info["missing_keys"])
