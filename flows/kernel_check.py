"""Checks before a night that the kernels of its device can compute a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.device.placement import resolve_device
from engine.encoding.families import is_encoder
from engine.errors import ConfigError
from engine.kernels.triton.shape import check_shape
from engine.model.layer_windows import find_windows
from engine.model.loading.checkpoint import GGUF_TENSORS, is_plain, read_json
from engine.model.loading.config_sizes import read_head_dim, read_size, read_sizes


def check_kernels(config: EngineConfig, checkpoint: Path) -> None:
    """Raises `ConfigError` if a decoder is computed on a GPU, whose kernels do not support its heads or the block size,
    or if the kernels of dtype "int8" or of `deterministic` do not support the model; with several ranks also as
    `check_ranks`. `ModelError` if config.json lacks a size."""
    if config.tensor_parallel_size > 1:
        from engine.model.sharded_model import check_ranks  # takes seconds to import

        check_ranks(config, checkpoint)
    if is_encoder(checkpoint):
        if config.dtype in ("fp8", "int8"):
            raise ConfigError(f"dtype {config.dtype!r} is for decoders, model {str(checkpoint)!r} is an encoder")
        return
    values = read_sizes(read_json(checkpoint / "config.json"))
    num_q_heads = read_size(values, "num_attention_heads")
    heads = {"num_q_heads": num_q_heads, "num_kv_heads": read_size(values, "num_key_value_heads", num_q_heads)}
    shape = {**heads, "head_dim": read_head_dim(values), "block_size": config.block_size}
    if config.dtype == "int8" or config.deterministic:
        setting = "dtype 'int8'" if config.dtype == "int8" else "deterministic"
        if reason := _why_not_exact(config, checkpoint, values, shape):
            raise ConfigError(f"model {str(checkpoint)!r}: {setting}: {reason}")
        return
    try:
        check_shape(**shape)
    except ValueError as error:
        if config.attention in ("paged", "relay", "fused") or resolve_device(config.device).type != "cpu":
            raise ConfigError(f"model {str(checkpoint)!r}: attention on a GPU: {error}") from error


def _why_not_exact(
    config: EngineConfig, checkpoint: Path, values: Mapping[str, Any], shape: Mapping[str, int]
) -> str | None:
    """Why the CPU kernels whose results do not depend on the batch do not support a model; None if they do."""
    from engine.kernels.cpu.attention_shape import AttentionShape  # takes a second to import

    if (device := resolve_device(config.device)).type != "cpu":
        return f"it is computed on a CPU, not on {device}: set device to cpu"
    try:
        AttentionShape(**shape)
    except ValueError as error:
        return str(error)
    is_quantized = bool(values.get("quantization_config")) or (checkpoint / GGUF_TENSORS).is_file()
    if config.dtype in ("auto", "quantized") and is_quantized:
        return None  # `check_weights` has checked it
    if windows := [window for window in find_windows(values) if window]:
        return f"it has no sliding window, config.json says one of {windows[0]} positions"
    if not is_plain(read_json(checkpoint / "config.json")):
        return _why_no_family(config, checkpoint)
    head_columns = {name: shape[name] * shape["head_dim"] for name in ("num_q_heads", "num_kv_heads")}
    sizes = {name: read_size(values, name) for name in ("hidden_size", "intermediate_size", "vocab_size")}
    sizes["num_attention_heads x head_dim"] = head_columns["num_q_heads"]
    sizes["columns of queries, keys and values"] = head_columns["num_q_heads"] + 2 * head_columns["num_kv_heads"]
    if config.dtype == "int8":
        del sizes["vocab_size"], sizes["num_attention_heads x head_dim"]
    wrong = ", ".join(f"{name} {size}" for name, size in sizes.items() if size % 32)
    return f"it takes sizes that are multiples of 32, config.json says {wrong}" if wrong else None


def _why_no_family(config: EngineConfig, checkpoint: Path) -> str | None:
    if config.dtype == "int8":
        return "the model's layers are not those of Llama, Mistral or Qwen"
    import torch

    from engine.model.families.family import find_family  # takes seconds to import
    from engine.model.plain.skeleton import make_skeleton

    model = make_skeleton(checkpoint, torch.float32)
    is_read = find_family(model, torch.device("cpu"), torch.float32) is not None
    return None if is_read else "the layers are transformers' own, whose products depend on the batch"
