"""Reads the layers of families that are not plain but that the C++ kernels support.

If a layer has anything unknown, transformers' own layers compute the model. `engine.model.proof.probe` compares what is
read here with transformers, in float32.
"""

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from engine.kernels.branched_layer import BranchedWeights
from engine.kernels.decoder_layer import DecoderLayers, Linear
from engine.kernels.scoring import Scoring
from engine.model.families.feed_forward import PARAMETERS, is_covered, read_feed_forward
from engine.model.families.layouts import LAYOUTS, Layout
from engine.model.families.rotated_layers import DistinctAngles, RotatedLayers, angles_of, order_of_dims
from engine.model.layers import join_linears, layer_window

if TYPE_CHECKING:
    import transformers

_HEADS = ("q_proj", "k_proj", "v_proj", "qkv_proj")


def find_family(
    language_model: "transformers.PreTrainedModel", device: torch.device, kv_dtype: torch.dtype
) -> "Family | None":
    """The reader of a model's layers; None if the kernels do not support them.

    Args:
        language_model, device: loaded, and where it is; only the CPU kernels support these families.
        kv_dtype: the layers in 8-bit formats do not support these families.
    """
    config = language_model.config.get_text_config(decoder=True)
    layout = LAYOUTS.get(config.model_type)
    if layout is None or device.type != "cpu" or kv_dtype.itemsize == 1:
        return None
    if getattr(config, "clip_qkv", None) is not None or getattr(config, "use_qk_norm", False):
        return None
    decoder = language_model.get_decoder()
    known = {f"{norm}.{kind}" for norm in layout.norms for kind in ("weight", "bias")}
    known |= {f"self_attn.{name}.{kind}" for name in (*_HEADS, layout.output) for kind in ("weight", "bias")}
    known |= {f"self_attn.{name}_norm.weight" for name in "qk"} | {"self_attn.sinks"}
    known |= {f"{layout.mlp}.{name}" for name in PARAMETERS}
    epsilons = set()
    for layer in decoder.layers:
        if any(name not in known for name, _ in layer.named_parameters()):
            return None
        if not layer.self_attn.is_causal or not is_covered(getattr(layer, layout.mlp)):
            return None
        epsilons |= {_epsilon(part) for name, part in layer.named_modules() if name.endswith("norm")}
    return Family(layout, decoder) if len(epsilons) == 1 else None


class Family:
    """Reads the layers of one model of a family; the rotary embedding of `decoder` computes each step's angles."""

    def __init__(self, layout: Layout, decoder: Any) -> None:
        self._layout = layout
        rotary = decoder.rotary_emb
        self._rotary = rotary if layout.angles is None else DistinctAngles(rotary, layout.angles)
        self._has_experts = any(hasattr(getattr(layer, layout.mlp), "experts") for layer in decoder.layers)
        attention = decoder.layers[0].self_attn
        self._head_dim = int(attention.head_dim)
        has_kinds = "layer_type" in inspect.signature(self._rotary.forward).parameters
        self._kinds: list[str | None] = [
            (decoder.config.layer_types[index] if has_kinds else "") if layout.is_rotated(layer.self_attn) else None
            for index, layer in enumerate(decoder.layers)
        ]
        self._rotations = tuple(dict.fromkeys(self._kinds))
        device = next(decoder.parameters()).device
        row, position = torch.zeros(1, 1, 1, device=device), torch.zeros(1, 1, dtype=torch.int64, device=device)
        sizes = {
            kind: self._head_dim if kind is None else angles_of(self._rotary, kind, row, position)[0].shape[-1]
            for kind in self._rotations
        }
        self._orders = {
            kind: order_of_dims(self._head_dim, size, layout.is_interleaved) for kind, size in sizes.items()
        }

    @property
    def reorders_heads(self) -> bool:
        """Whether the dimensions of any layer's query and key heads have another order than in the files."""
        return any(order is not None for order in self._orders.values())

    def read_weights(self, layer: Any, index: int) -> BranchedWeights:
        """The weights of a transformers layer. The dimensions of query and key heads are reordered for the kernels'
        rotation; scores, sums over all dimensions, do not change."""
        attention, layout = layer.self_attn, self._layout
        kind = self._kinds[index]
        order = self._orders[kind] if kind is not None else None
        q_norm, k_norm = (getattr(getattr(attention, f"{name}_norm", None), "weight", None) for name in "qk")
        q_norm, k_norm = self._reorder(q_norm, order), self._reorder(k_norm, order)
        is_apart = q_norm is not None and (layout.norm_offset != 0 or len(q_norm) != self._head_dim)
        output, sinks = getattr(attention, layout.output), getattr(attention, "sinks", None)
        first_norm = getattr(layer, layout.attention_norm or layout.post_attention_norm)
        return BranchedWeights(
            attention_norm=_norm(layer, layout.attention_norm),
            qkv=self._read_heads(attention, order),
            output=(output.weight, output.bias),
            mlp_norm=_norm(layer, layout.mlp_norm),
            q_norm=None if is_apart else q_norm,
            k_norm=None if is_apart else k_norm,
            epsilon=next(_epsilon(part) for name, part in layer.named_modules() if name.endswith("norm")),
            scoring=Scoring(
                scale=float(attention.scaling),
                softcap=float(getattr(attention, "attn_logit_softcapping", None) or 0.0),
                window=layer_window(attention.config, index),
                sinks=None if sinks is None else sinks.float(),
            ),
            post_attention_norm=_norm(layer, layout.post_attention_norm) if layout.post_attention_norm else None,
            post_mlp_norm=_norm(layer, layout.post_mlp_norm) if layout.post_mlp_norm else None,
            apart_q_norm=q_norm if is_apart else None,
            apart_k_norm=k_norm if is_apart else None,
            attention_norm_bias=_norm_bias(layer, layout.attention_norm),
            mlp_norm_bias=_norm_bias(layer, layout.mlp_norm),
            is_centered="LayerNorm" in type(first_norm).__name__,
            is_parallel=layout.is_parallel,
            norm_offset=layout.norm_offset,
            multiplier=float(getattr(layer, "residual_multiplier", 1.0)),
            rotation=self._rotations.index(kind),
            **read_feed_forward(getattr(layer, layout.mlp), among_experts=self._has_experts),
        )

    def join_layers(self, layers: DecoderLayers) -> nn.Module:
        """The backend's layers as one module, in place of all layers of the transformers model."""
        return RotatedLayers(layers, self._rotary, self._rotations, self._head_dim)

    def _read_heads(self, attention: Any, order: torch.Tensor | None) -> Linear:
        """Query, key and value heads in one product."""
        if hasattr(attention, "qkv_proj"):
            weight, bias = attention.qkv_proj.weight, attention.qkv_proj.bias
        else:
            weight, bias = join_linears(attention.q_proj, attention.k_proj, attention.v_proj)
        if order is None:
            return weight, bias
        num_kv_columns = (len(weight) - getattr(attention, self._layout.output).weight.shape[1]) // 2
        parts = [
            torch.cat([self._reorder(part[:-num_kv_columns], order), part[-num_kv_columns:]])
            for part in (weight, bias)
            if part is not None
        ]
        return parts[0], parts[1] if len(parts) == 2 else None

    def _reorder(self, heads: Any, order: torch.Tensor | None) -> Any:
        """``[heads * head_dim, ...]``, or None, with the dimensions of each head in this order."""
        if heads is None or order is None:
            return heads
        return heads.unflatten(0, (-1, self._head_dim))[:, order.to(heads.device)].flatten(0, 1)


def _norm(layer: Any, name: str) -> torch.Tensor:
    """The weight of a norm; empty if the layer has no such norm."""
    return getattr(layer, name).weight if name else torch.empty(0)


def _norm_bias(layer: Any, name: str) -> torch.Tensor | None:
    return getattr(getattr(layer, name), "bias", None) if name else None


def _epsilon(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)
