"""The limits on one request and on the KV budget. No check needs the weights."""

from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.device.placement import dtype_name, find_dtype, resolve_device
from engine.errors import CapacityError
from engine.model.loading.checkpoint import (
    GGUF_TENSORS,
    check_layers,
    is_quantized,
    read_end_tokens,
    read_json,
    weight_shapes,
)
from engine.model.loading.config_sizes import check_shapes, kv_bytes_per_layer, read_size, read_sizes
from engine.request import Request
from engine.scheduling.sequence import most_blocks, most_tokens

if TYPE_CHECKING:  # take seconds to import
    from engine.kv.kv_cache import KVCache
    from engine.model.model import Model


def check_kv_budget(config: EngineConfig, checkpoint: Path) -> None:
    """Raises `CapacityError` if a KV budget that is not "auto" is below the two blocks that the shortest request needs,
    before any work; `ModelError` if config.json in the checkpoint's folder cannot be read, or lacks a size."""
    if config.kv_memory_bytes == "auto":
        return
    values, dtype = read_sizes(read_json(checkpoint / "config.json")), config.dtype
    layer_bytes = config.block_size * kv_bytes_per_layer(values, "float32" if dtype == "auto" else dtype)
    num_layers = read_size(values, "num_hidden_layers")
    if dtype == "auto" and config.kv_memory_bytes < 2 * num_layers * layer_bytes:  # else there is enough for any format
        name = dtype_name(find_dtype("auto", resolve_device(config.device)))  # imports torch
        layer_bytes = config.block_size * kv_bytes_per_layer(values, name)
    num_bytes = num_layers * layer_bytes
    if config.kv_memory_bytes < 2 * num_bytes:
        needs = f"one block of {config.block_size} tokens needs {num_bytes} bytes, and the shortest request two blocks"
        raise CapacityError(f"a KV budget of {config.kv_memory_bytes} bytes holds no request: {needs}")


def check_weights(config: EngineConfig, checkpoint: Path) -> None:
    """Refuses weights that do not fit config.json or are not computed, and unusable end tokens, before any work."""
    shapes = weight_shapes(checkpoint)
    check_layers(checkpoint, shapes)
    check_shapes(checkpoint, shapes)
    read_end_tokens(checkpoint)
    if config.dtype == "fp8":
        find_dtype("fp8", resolve_device(config.device))
    can_unpack = config.dtype != "quantized" and (checkpoint / GGUF_TENSORS).is_file()
    if not can_unpack and is_quantized(checkpoint):
        from engine.model.quantized.quantized_model import find_quantized  # imported only when needed

        find_quantized(checkpoint, config, resolve_device(config.device))


def why_impossible(
    request: Request, model: "Model", cache: "KVCache", max_model_len: int, *, can_decode: bool
) -> str | None:
    """Why a request cannot be answered even alone; None where it can. Prompt and answer have at most max_model_len
    tokens; `can_decode` says whether there is a decoder for stop strings. See `Engine.why_impossible`."""
    if not model.has_output_layer and not request.is_pooled:
        return "the checkpoint has no output layer, which generating and scoring take"
    num_prompt_tokens = len(request.token_ids)
    others = (*request.labels, request.thinking.closing) if request.thinking else request.labels
    largest = max(int(request.token_ids.max()), *map(max, others), 0)
    if largest >= model.vocab_size:
        return f"token id {largest} is not below the vocabulary size {model.vocab_size}"
    if (smallest := min(map(min, others), default=0)) < 0:
        return f"token ids must not be negative, got {smallest}"
    num_tokens = most_tokens(request)
    if num_tokens > max_model_len:
        prompt = f"the prompt has {num_prompt_tokens} tokens, with {num_tokens - num_prompt_tokens} for the answer"
        return f"{prompt} {num_tokens}, which exceeds the context of {max_model_len}"
    num_blocks, num_kv_blocks = most_blocks(request, cache.block_size), cache.num_blocks // len(cache.layout.windows)
    if num_blocks > num_kv_blocks:
        needs = f"{num_tokens} tokens need up to {num_blocks} KV blocks of {cache.block_size} tokens"
        return f"{needs}, the memory budget holds {num_kv_blocks}"
    if request.grammar is not None and request.grammar.vocabulary.size != model.vocab_size:
        return f"its grammar is of {request.grammar.vocabulary.size} tokens, the model has {model.vocab_size}"
    return "stop strings need the caller's decoder: pass decode=" if request.stop and not can_decode else None
