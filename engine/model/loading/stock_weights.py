"""Configurations and weights as transformers reads them, for models that are not plain."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from engine.errors import ModelError
from engine.model.loading.checkpoint import GGUF_TENSORS


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keeps transformers from drawing bars of its own for the length of the block."""
    is_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_enabled:
            logging.enable_progress_bar()


def read_config(folder: Path) -> transformers.PretrainedConfig:
    """A checkpoint's configuration.

    Raises:
        ModelError: it cannot be read, or transformers does not know the architecture.
    """
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # classes check what they are given in ways of their own
        raise ModelError(f"model {str(folder)!r}: config.json cannot be used: {error}") from error


def empty_stock_model(
    config: transformers.PretrainedConfig, folder: Path, dtype: torch.dtype
) -> transformers.PreTrainedModel:
    """A checkpoint's model without memory for its weights, but with what turns positions into angles.

    Args:
        config: of it, or of a share of it.
        folder: of the checkpoint, whose generation_config.json is read.
        dtype: of the weights.
    """
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    base = model.get_decoder()
    base.rotary_emb = type(base.rotary_emb)(base.config)
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model.eval().requires_grad_(False)


def load_weights(
    folder: Path, config: transformers.PretrainedConfig, *, dtype: torch.dtype, device: torch.device
) -> tuple[transformers.PreTrainedModel, bool]:
    """Reads a checkpoint's weights straight onto a device.

    Args:
        folder: the checkpoint's.
        config: from `read_config`.
        dtype: of the weights.
        device: where they go.
    Raises:
        ModelError: a file is damaged, or weights of the architecture are missing, which would else be random.
    Returns:
        the model, and whether its output layer was read: models that embed or classify need none.
    """
    if (folder / GGUF_TENSORS).is_file():
        from engine.model.loading.gguf import unpack_gguf

        folder = unpack_gguf(folder)
    try:
        with no_progress_bars(), device:
            loaded, info = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # safetensors and torch raise their own kinds for a damaged file
        raise ModelError(f"model {str(folder)!r}: the weights cannot be read: {error}") from error
    # A file stays mapped, with all that was read of it, while a tensor is used as it lies there; kernels copy others.
    embedding = loaded.get_input_embeddings().weight
    for parameter in (each for each in loaded.parameters() if each.ndim == 1 or each is embedding):
        parameter.data = parameter.data.clone()
    head = loaded.get_output_embeddings()
    names = [name for name, module in loaded.named_modules() if module is head]
    lacking = set(info["missing_keys"])
    if missing := sorted(lacking - {f"{name}.{part}" for name in names for part in ("weight", "bias")}):
        raise ModelError(f"model {str(folder)!r}: its files lack {len(missing)} weights, {missing[0]} first")
    return loaded, not lacking
