"""A model on the CPU whose weights stay quantized as in its file, computed in bfloat16 or float32."""

import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.config import EngineConfig
from engine.device.placement import dtype_name
from engine.errors import ModelError
from engine.kernels.attention_backend import AttentionBackend
from engine.kernels.cpu.native import NativeBackend
from engine.kernels.cpu.native_build import NativeBuildError
from engine.kernels.cpu.native_layers import PackedOutputLayer
from engine.kernels.cpu.quantized import (
    QuantizedColumns,
    QuantizedLayer,
    QuantizedWeight,
    element_type,
    make_quantized_layers,
)
from engine.model.families.family import find_family
from engine.model.families.feed_forward import PRODUCTS
from engine.model.layer_windows import find_windows
from engine.model.layers import TiedEmbedding
from engine.model.loading.checkpoint import (
    GGUF_TENSORS,
    PLAIN_MODEL_TYPES,
    cache_folder,
    check_layers,
    is_plain,
)
from engine.model.loading.other_weights import refuse_unread
from engine.model.model import Model, kv_shape_of
from engine.model.plain.skeleton import make_skeleton, read_config_of
from engine.model.quantized.gguf_weights import GgufWeights
from engine.model.quantized.grouped_weights import GroupedWeights
from engine.model.quantized.mapped_tensors import quantized_library

QuantizedWeights = GgufWeights | GroupedWeights
Parts = list[QuantizedColumns]

LOGGER = logging.getLogger("batchloom.engine")

_announce = cache(LOGGER.info)  # logs the same message once, although a forecast looks again


def load_quantized(folder: Path, config: EngineConfig, device: torch.device) -> "QuantizedModel | None":
    """A model with its weights left quantized; None if they are unpacked instead, which is logged for dtype "auto".

    Args:
        folder: of a checkpoint for which `is_quantized` is true.
        config: its dtype is "quantized" or "auto" where weights are to stay quantized.
        device: where the model will be computed.
    Raises:
        ModelError: the checkpoint or this machine is not supported; for a GGUF file only if dtype is "quantized".
    """
    weights = find_quantized(folder, config, device)
    if weights is None:
        return None
    dtype = find_quantized_dtype()
    unpacking = f"; dtype {dtype_name(dtype)} would unpack them" if isinstance(weights, GgufWeights) else ""
    LOGGER.info("weights stay quantized as in %s%s", weights.file.name, unpacking)
    return QuantizedModel(make_skeleton(folder, dtype), weights, device)


def find_quantized(folder: Path, config: EngineConfig, device: torch.device) -> QuantizedWeights | None:
    """The weights that the engine leaves quantized, or None. See `load_quantized`, `refuse_unread`."""
    values = read_config_of(folder)
    is_gguf = (folder / GGUF_TENSORS).is_file()
    can_unpack = is_gguf or not is_plain(values.to_dict())
    if config.dtype not in ("auto", "quantized"):
        if not can_unpack:
            why = "only weights of GGUF files are unpacked; dtype auto keeps these quantized"
            raise ModelError(f"model {str(folder)!r}: dtype {config.dtype!r}: {why}")
        return None
    check_layers(folder)
    weights = GgufWeights(folder) if is_gguf else GroupedWeights(folder)
    lacks_kernels = False
    try:
        reason = _why_not(folder, values, weights, config, device)
    except NativeBuildError as error:
        reason, lacks_kernels = str(error), True
    if reason is None:
        if isinstance(weights, GroupedWeights):  # of a GGUF file these are known once it is opened
            known = make_skeleton(folder, torch.float32).named_parameters(remove_duplicate=False)
            refuse_unread(folder, weights.names, dict(known))
        return weights
    if config.dtype == "quantized" or not can_unpack:
        raise ModelError(f"model {str(weights.file)!r}: dtype 'quantized': {reason}")
    if lacks_kernels:  # `make_attention` logs why
        reason = "to stay quantized they need compiled kernels"
    _announce("the weights of %s are unpacked: %s", weights.file.name, reason)
    return None


def find_quantized_dtype() -> torch.dtype:
    """What this machine computes quantized weights in: bfloat16 or float32. Raises as `quantized_library`."""
    return element_type(quantized_library())


def _why_not(
    folder: Path, values: Any, weights: QuantizedWeights, config: EngineConfig, device: torch.device
) -> str | None:
    """Why the weights cannot stay quantized. Raises `NativeBuildError` as `quantized_library`."""
    if device.type != "cpu" or config.attention not in ("auto", "native"):
        return f"that is for a CPU and attention 'native', got device {device} and attention {config.attention!r}"
    if not is_plain(values.to_dict()):
        # The same model without weights shows whether its layers can be read here.
        is_known = values.model_type in weights.families
        family = find_family(make_skeleton(folder, torch.float32), device, torch.float32) if is_known else None
        if family is None or family.reorders_heads:
            return "the model's layers are not those of " + ", ".join((*PLAIN_MODEL_TYPES, *weights.families))
    if weights.why_not_covered is not None:
        return weights.why_not_covered
    if config.deterministic and find_windows(values.to_dict()):
        return "deterministic takes layers without a sliding window"
    num_q_heads = int(values.num_attention_heads)
    try:
        kv = kv_shape_of(values, find_quantized_dtype())
        heads: dict[str, Any] = {"num_q_heads": num_q_heads, "num_kv_heads": kv.num_kv_heads, "head_dim": kv.head_dim}
        NativeBackend(**heads, dtype=kv.dtype, block_size=config.block_size, folder=cache_folder())
    except ValueError as error:
        return str(error)
    qkv_size = (num_q_heads + 2 * kv.num_kv_heads) * kv.head_dim
    inner_sizes = (values.intermediate_size, getattr(values, "moe_intermediate_size", None) or 0)
    for size in (qkv_size, int(values.hidden_size), *map(int, inner_sizes)):
        if size % 32:
            return f"sizes must be multiples of 32, got {size}"
    return None


class QuantizedModel(Model):
    """A `Model` on the CPU with quantized `weights`; `skeleton` is the same model on the meta device."""

    def __init__(self, skeleton: Any, weights: QuantizedWeights, device: torch.device) -> None:
        super().__init__(skeleton, device=device, owns_weights=True)
        self._weights = weights

    @torch.inference_mode()
    def use_layers_of(self, backend: AttentionBackend) -> None:
        """Reads the weights into the backend's layers."""
        assert isinstance(backend, NativeBackend), "load_quantized has checked the backend"
        weights, base = self._weights, self.base
        self.draw_tokens = backend.draw_tokens
        _read_unquantized(weights, base.norm, "norm", self.dtype)
        layers = [self._read_packed(layer, index) for index, layer in enumerate(base.layers)]
        embedding = head = QuantizedWeight([weights.columns("embed_tokens")])
        if "lm_head" in weights:
            head = QuantizedWeight([weights.columns("lm_head")])
        elif not self.settings.get("tie_word_embeddings"):
            self.has_output_layer = False
        for weight in (embedding, head):
            self._check_size("embedding or output layer", weight, (self.vocab_size, self.hidden_size))
        self._output_layer = PackedOutputLayer(backend, head)
        scale = getattr(base.embed_tokens, "scalar_embed_scale", None)  # Gemma
        scale = None if scale is None else torch.tensor(scale).to(self.dtype)
        base.embed_tokens = TiedEmbedding(PackedOutputLayer(backend, embedding), scale)
        self._join(make_quantized_layers(backend, layers))
        products = [product for _, of_layer in layers for product in of_layer]
        self.weight_bytes = sum(weight.num_bytes for weight in {*products, embedding, head})

    def _read_packed(self, layer: Any, index: int) -> QuantizedLayer:
        """The weights of a layer on the meta device; raises `ModelError` if its sizes are not those of the file."""
        _read_unquantized(self._weights, layer, f"layers.{index}", self.dtype)
        read = self._read_layer(layer, index)
        biases = (read.qkv[1], read.output[1], getattr(read, "gate_bias", None), None)
        sizes = (read.qkv[0].shape, read.output[0].shape, (len(read.gate) + len(read.up), read.gate.shape[1]))
        parts = _read_products(self._weights, layer, f"layers.{index}")
        products = [
            QuantizedWeight(part, bias, is_gated=number == 2 and read.up.numel() > 0)
            for number, (part, bias) in enumerate(zip(parts, biases, strict=True))
        ]
        for product, size in zip(products, (*sizes, read.down.shape), strict=True):
            self._check_size(f"layer {index}", product, size)
        return read, products

    def _check_size(self, name: str, product: QuantizedWeight, size: tuple[int, ...]) -> None:
        if (found := (product.num_columns, product.depth)) != tuple(size):
            why = f"{name} has a matrix of {found}, config.json says {tuple(size)}"
            raise ModelError(f"model {str(self._weights.file)!r}: {why}")


def _read_unquantized(weights: QuantizedWeights, module: nn.Module, place: str, dtype: torch.dtype) -> None:
    """Reads the parameters of a module that are not quantized: norms, biases and routers of experts."""
    for name, parameter in [*module.named_parameters()]:
        owner, _, kind = name.rpartition(".")
        if parameter.ndim == 1 or owner == "mlp.gate":
            read = weights.vector(".".join(filter(None, (place, owner))), kind)
            if len(read) != parameter.numel():
                why = f"{place} has a {name} of {len(read)}, config.json says {parameter.numel()}"
                raise ModelError(f"model {str(weights.file)!r}: {why}")
            read = read.view(parameter.shape).to(dtype)
            setattr(module.get_submodule(owner), kind, nn.Parameter(read, requires_grad=False))


def _read_products(weights: QuantizedWeights, layer: Any, place: str) -> list[Parts]:
    """The products of a layer by their parts: qkv, output, gate and up (or the first product without a gate), down."""

    def read(*names: str) -> Parts:
        return [weights.columns(f"{place}.{name}") for name in names]

    def read_experts(name: str) -> Parts:
        if f"{place}.mlp.experts.{name}_proj" in weights:
            return read(f"mlp.experts.{name}_proj")
        return read(*(f"mlp.experts.{number}.{name}_proj" for number in range(mlp.experts.num_experts)))

    mlp = layer.mlp
    heads = ("qkv",) if hasattr(layer.self_attn, "qkv_proj") else ("q", "k", "v")
    if hasattr(mlp, "experts"):
        first, down = [*read_experts("gate"), *read_experts("up")], read_experts("down")
    else:
        *names, last = next(names for names in PRODUCTS if hasattr(mlp, names[0]))
        first, down = read(*(f"mlp.{name}" for name in names)), read(f"mlp.{last}")
    return [read(*(f"self_attn.{name}_proj" for name in heads)), read("self_attn.o_proj"), first, down]
