"""A model on the CPU whose weights stay quantized as in its file, computed in bfloat16."""

import ctypes
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.kernels.attention_backend import AttentionBackend
from engine.kernels.cpu.native_build import NativeBuildError
from engine.kernels.cpu.native_layers import NativeBackend
from engine.kernels.cpu.quantized import (
    QuantizedLayer,
    QuantizedOutputLayer,
    QuantizedWeight,
    load_quantized_library,
    make_quantized_layers,
)
from engine.model.layer_windows import find_windows
from engine.model.layers import ReplacedLayers, TiedEmbedding, read_weights
from engine.model.loading.checkpoint import (
    GGUF_TENSORS,
    cache_folder,
    check_layers,
    is_plain,
    resolve_checkpoint,
)
from engine.model.model import Model
from engine.model.plain.skeleton import make_skeleton, read_config_of
from engine.model.quantized.gguf_weights import GgufWeights
from engine.model.quantized.grouped_weights import GroupedWeights, read_quantization

QuantizedWeights = GgufWeights | GroupedWeights

LOGGER = logging.getLogger("batchloom.engine")


def load_quantized(model: str | Path, config: EngineConfig, device: torch.device) -> "QuantizedModel | None":
    """A model with its weights left quantized; None if they are unpacked instead, which is logged for dtype "auto".

    Args:
        model: see `resolve_checkpoint`; `is_quantized` is true for it.
        config: its dtype is "quantized" or "auto" where weights are to stay quantized.
    Raises:
        ModelError: the checkpoint or this machine is not supported; for a GGUF file only if dtype is "quantized".
    """
    folder = resolve_checkpoint(model)
    weights = find_quantized(folder, config, device)
    if weights is None:
        return None
    unpacking = "; dtype bfloat16 would unpack them" if isinstance(weights, GgufWeights) else ""
    LOGGER.info("weights stay quantized as in %s%s", weights.file.name, unpacking)
    return QuantizedModel(make_skeleton(folder, torch.bfloat16), weights, device)


def find_quantized(folder: Path, config: EngineConfig, device: torch.device) -> QuantizedWeights | None:
    """The weights that the engine leaves quantized, or None. See `load_quantized`."""
    values = read_config_of(folder)
    is_gguf = (folder / GGUF_TENSORS).is_file()
    if config.dtype not in ("auto", "quantized"):
        if not is_gguf and is_plain(values.to_dict()):
            why = "only weights of GGUF files are unpacked; dtype auto keeps these quantized"
            raise ModelError(f"model {str(folder)!r}: dtype {config.dtype!r}: {why}")
        return None
    check_layers(folder)
    weights = GgufWeights(folder) if is_gguf else GroupedWeights(folder, read_quantization(folder))
    reason = _why_not(values, weights, config, device)
    if reason is None:
        return weights
    if config.dtype == "quantized" or (not is_gguf and is_plain(values.to_dict())):
        raise ModelError(f"model {str(weights.file)!r}: dtype 'quantized': {reason}")
    LOGGER.info("the weights of %s are unpacked: %s", weights.file.name, reason)
    return None


def _why_not(values: Any, weights: QuantizedWeights, config: EngineConfig, device: torch.device) -> str | None:
    if device.type != "cpu" or config.attention not in ("auto", "native"):
        return f"that is for a CPU and attention 'native', got device {device} and attention {config.attention!r}"
    if not is_plain(values.to_dict()):
        return "the model's layers are not those of Llama, Mistral or Qwen"
    if weights.why_not_covered is not None:
        return weights.why_not_covered
    if config.deterministic and find_windows(values.to_dict()):
        return "deterministic takes layers without a sliding window"
    num_q_heads = int(values.num_attention_heads)
    try:
        backend = NativeBackend(
            has_layers=True,
            num_q_heads=num_q_heads,
            num_kv_heads=int(getattr(values, "num_key_value_heads", None) or num_q_heads),
            head_dim=int(getattr(values, "head_dim", None) or values.hidden_size // num_q_heads),
            dtype=torch.bfloat16,
            block_size=config.block_size,
            folder=cache_folder(),
        )
    except (ValueError, NativeBuildError) as error:
        return str(error)
    if not backend.has_products:
        return "this CPU does not multiply bfloat16"
    qkv_size = (num_q_heads + 2 * backend.num_kv_heads) * backend.head_dim
    for size in (qkv_size, int(values.hidden_size), int(values.intermediate_size)):
        if size % 32:
            return f"sizes must be multiples of 32, got {size}"
    return None


class QuantizedModel(Model):
    """A `Model` on the CPU whose layers, output layer and embeddings have quantized weights; `skeleton` is the same
    model on the meta device."""

    def __init__(self, skeleton: Any, weights: QuantizedWeights, device: torch.device) -> None:
        super().__init__(skeleton, device=device, owns_weights=True)
        self._weights = weights

    @torch.inference_mode()
    def use_layers_of(self, backend: AttentionBackend) -> None:
        """Reads the weights into the backend's layers."""
        assert isinstance(backend, NativeBackend), "load_quantized has checked the backend"
        library, weights, base = load_quantized_library(cache_folder()), self._weights, self.base
        self.draw_tokens = backend.draw_tokens
        is_permuted = isinstance(weights, GgufWeights) and base.config.model_type in ("llama", "mistral")
        layers = [
            _read_layer(weights, library, layer, index, is_permuted=is_permuted)
            for index, layer in enumerate(base.layers)
        ]
        embedding = QuantizedWeight([weights.columns(library, "embed_tokens")])
        head = QuantizedWeight([weights.columns(library, "lm_head")]) if "lm_head" in weights else embedding
        self._output_layer = QuantizedOutputLayer(backend, library, head)
        base.embed_tokens = TiedEmbedding(QuantizedOutputLayer(backend, library, embedding))
        base.norm.weight = nn.Parameter(weights.vector("norm"), requires_grad=False)
        base.layers = nn.ModuleList([ReplacedLayers(make_quantized_layers(backend, library, layers))])
        self.has_replaced_layers = True
        products = [product for _, of_layer in layers for product in of_layer]
        self.weight_bytes = sum(weight.num_bytes for weight in {*products, embedding, head})


def _read_layer(
    weights: QuantizedWeights, library: ctypes.CDLL, layer: Any, index: int, *, is_permuted: bool
) -> QuantizedLayer:
    """The weights of a layer on the meta device. With `is_permuted`, the file has the rows of query and key heads in
    GGUF's order for Llama."""
    shape, place = read_weights(layer, index), f"layers.{index}"

    def order_of(name: str) -> npt.NDArray[np.int64]:
        linear = layer.get_submodule(name)
        num_rows = int(linear.out_features)
        if is_permuted and name.endswith(("q_proj", "k_proj")):
            return _permuted_rows(num_rows, layer.self_attn.head_dim)
        return np.arange(num_rows)

    def product(*names: str, has_bias: bool = False, is_gated: bool = False) -> QuantizedWeight:
        parts = [weights.columns(library, f"{place}.{name}", order_of(name)) for name in names]
        biases = [weights.vector(f"{place}.{name}", "bias")[order_of(name)] for name in names if has_bias]
        return QuantizedWeight(parts, torch.cat(biases) if has_bias else None, is_gated=is_gated)

    qkv = [f"self_attn.{name}_proj" for name in "qkv"]
    with_norms = replace(
        shape,
        attention_norm=weights.vector(f"{place}.input_layernorm"),
        mlp_norm=weights.vector(f"{place}.post_attention_layernorm"),
        q_norm=None if shape.q_norm is None else weights.vector(f"{place}.self_attn.q_norm"),
        k_norm=None if shape.k_norm is None else weights.vector(f"{place}.self_attn.k_norm"),
    )
    return with_norms, (
        product(*qkv, has_bias=shape.qkv[1] is not None),
        product("self_attn.o_proj", has_bias=shape.output[1] is not None),
        product("mlp.gate_proj", "mlp.up_proj", is_gated=True),
        product("mlp.down_proj"),
    )


def _permuted_rows(num_rows: int, head_dim: int) -> npt.NDArray[np.int64]:
    """The file's row of each row in transformers' order: GGUF files interleave the two halves of Llama's heads."""
    return np.arange(num_rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).ravel().astype(np.int64)
