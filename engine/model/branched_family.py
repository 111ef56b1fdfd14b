"""Families whose layers batchloom's CPU kernels compute beside Llama's: what their modules are called, what differs.

Where a layer has anything else, transformers' own layers compute the model. The proof at the door compares what is read
here with transformers in float32 (`engine.model.proof.probe`).
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from engine.kernels.branched_layer import BranchedWeights
from engine.kernels.decoder_layer import DecoderLayers, Linear
from engine.model.attention import window_of
from engine.model.layers import join_linears, sliding_window_of
from engine.model.rotated_layers import RotatedLayers, angles_of, order_of_dims

_GATES = {"SiLUActivation": "silu", "SiLU": "silu", "GELUTanh": "gelu"}
_ATTENTION = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a family calls its norms, and in what else it differs.

    Attributes:
        attention_norm, mlp_norm: before attention and feed-forward; empty: none.
        post_attention_norm, post_mlp_norm: after them, before they are added; empty: none.
        norm_offset: added to the weights of norms.
        is_interleaved: whether neighbouring dimensions are rotated together, not those half a head apart.
        is_rotated: whether an attention module rotates its heads.
    """

    attention_norm: str = "input_layernorm"
    post_attention_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    post_mlp_norm: str = ""
    norm_offset: float = 0.0
    is_interleaved: bool = False
    is_rotated: Callable[[Any], bool] = lambda attention: True

    @property
    def norms(self) -> tuple[str, ...]:
        """The names of those that there are."""
        names = (self.attention_norm, self.post_attention_norm, self.mlp_norm, self.post_mlp_norm)
        return tuple(name for name in names if name)


_GEMMA = Layout(
    post_attention_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
    norm_offset=1.0,
)
_OLMO = Layout(
    attention_norm="",
    post_attention_norm="post_attention_layernorm",
    mlp_norm="",
    post_mlp_norm="post_feedforward_layernorm",
)
_EXAONE = Layout(
    attention_norm="",
    post_attention_norm="post_attention_layernorm",
    mlp_norm="",
    post_mlp_norm="post_feedforward_layernorm",
    is_rotated=lambda attention: attention.sliding_window is None or attention.is_sliding,
)
_GLM = Layout(post_attention_norm="post_self_attn_layernorm", post_mlp_norm="post_mlp_layernorm", is_interleaved=True)

LAYOUTS = {
    "ernie4_5": Layout(is_interleaved=True),
    "exaone4": _EXAONE,
    "gemma": Layout(norm_offset=1.0),
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "glm4": _GLM,
    "granite": Layout(),
    "ministral": Layout(),
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "phi3": Layout(),
    "seed_oss": Layout(),
    "smollm3": Layout(is_rotated=lambda attention: bool(attention.use_rope)),
}
"""By `model_type`."""


def find_family(
    language_model: transformers.PreTrainedModel, device: torch.device, kv_dtype: torch.dtype
) -> "Family | None":
    """How the layers of a model are read; None where they have anything that is not covered.

    Args:
        language_model: loaded.
        device: where it is; layers of a GPU do not cover these families.
        kv_dtype: of its KV; layers in int8 do not either.
    """
    layout = LAYOUTS.get(language_model.config.get_text_config(decoder=True).model_type)
    if layout is None or device.type != "cpu" or kv_dtype == torch.int8:
        return None
    decoder = language_model.get_decoder()
    known = {f"{norm}.weight" for norm in layout.norms} | {f"self_attn.{name}_norm.weight" for name in "qk"}
    known |= {f"self_attn.{name}.{kind}" for name in _ATTENTION for kind in ("weight", "bias")}
    known |= {f"mlp.{name}.weight" for name in _MLP}
    epsilons = set()
    for layer in decoder.layers:
        if any(name not in known for name, _ in layer.named_parameters()) or _gate_of(layer) is None:
            return None
        if not layer.self_attn.is_causal:
            return None
        epsilons |= {_epsilon(part) for name, part in layer.named_modules() if name.endswith("norm")}
    return Family(layout, decoder) if len(epsilons) == 1 else None


class Family:
    """Reads the layers of one model.

    Args:
        layout: of its family.
        decoder: the model without its output layer; its rotations are used in every step.
    """

    def __init__(self, layout: Layout, decoder: Any) -> None:
        self._layout = layout
        self._rotary = decoder.rotary_emb
        attention = decoder.layers[0].self_attn
        self._head_dim = int(attention.head_dim)
        has_kinds = "layer_type" in inspect.signature(self._rotary.forward).parameters
        self._kinds: list[str | None] = [
            (decoder.config.layer_types[index] if has_kinds else "") if layout.is_rotated(layer.self_attn) else None
            for index, layer in enumerate(decoder.layers)
        ]
        self._rotations = tuple(dict.fromkeys(self._kinds))
        device = next(decoder.parameters()).device
        nowhere, first = torch.zeros(1, 1, 1, device=device), torch.zeros(1, 1, dtype=torch.int64, device=device)
        sizes = {
            kind: self._head_dim if kind is None else angles_of(self._rotary, kind, nowhere, first)[0].shape[-1]
            for kind in self._rotations
        }
        self._orders = {
            kind: order_of_dims(self._head_dim, size, layout.is_interleaved) for kind, size in sizes.items()
        }

    def read_weights(self, layer: Any, index: int) -> BranchedWeights:
        """The weights of a transformers layer.

        The dimensions of query and key heads are put in the order in which the kernels rotate them; scores are sums
        over all of them.
        """
        attention, mlp, layout = layer.self_attn, layer.mlp, self._layout
        kind = self._kinds[index]
        order = self._orders[kind] if kind is not None else None
        q_norm, k_norm = (getattr(getattr(attention, f"{name}_norm", None), "weight", None) for name in "qk")
        q_norm, k_norm = self._reorder(q_norm, order), self._reorder(k_norm, order)
        is_apart = q_norm is not None and (layout.norm_offset != 0 or len(q_norm) != self._head_dim)
        gate, up = (
            mlp.gate_up_proj.weight.chunk(2)
            if hasattr(mlp, "gate_up_proj")
            else (
                mlp.gate_proj.weight,
                mlp.up_proj.weight,
            )
        )
        gate_function = _gate_of(layer)
        assert gate_function is not None, "find_family refuses other gates"
        is_windowed = getattr(attention, "is_sliding", True)
        return BranchedWeights(
            attention_norm=_norm(layer, layout.attention_norm),
            qkv=self._read_heads(attention, order),
            output=(attention.o_proj.weight, attention.o_proj.bias),
            mlp_norm=_norm(layer, layout.mlp_norm),
            gate=gate,
            up=up,
            down=mlp.down_proj.weight,
            q_norm=None if is_apart else q_norm,
            k_norm=None if is_apart else k_norm,
            epsilon=next(_epsilon(part) for name, part in layer.named_modules() if name.endswith("norm")),
            scale=float(attention.scaling),
            window=window_of(sliding_window_of(attention), attention.config) if is_windowed else 0,
            post_attention_norm=_norm(layer, layout.post_attention_norm) if layout.post_attention_norm else None,
            post_mlp_norm=_norm(layer, layout.post_mlp_norm) if layout.post_mlp_norm else None,
            apart_q_norm=q_norm if is_apart else None,
            apart_k_norm=k_norm if is_apart else None,
            norm_offset=layout.norm_offset,
            softcap=float(getattr(attention, "attn_logit_softcapping", None) or 0.0),
            multiplier=float(getattr(layer, "residual_multiplier", 1.0)),
            gate_function=gate_function,
            rotation=self._rotations.index(kind),
        )

    def join_layers(self, layers: DecoderLayers) -> nn.Module:
        """All layers of the transformers model as one."""
        return RotatedLayers(layers, self._rotary, self._rotations, self._head_dim)

    def _read_heads(self, attention: Any, order: torch.Tensor | None) -> Linear:
        """Query, key and value heads in one product."""
        if hasattr(attention, "qkv_proj"):
            weight, bias = attention.qkv_proj.weight, attention.qkv_proj.bias
        else:
            weight, bias = join_linears(attention.q_proj, attention.k_proj, attention.v_proj)
        if order is None:
            return weight, bias
        num_kv_columns = (len(weight) - attention.o_proj.weight.shape[1]) // 2
        parts = [
            torch.cat([self._reorder(part[:-num_kv_columns], order), part[-num_kv_columns:]])
            for part in (weight, bias)
            if part is not None
        ]
        return parts[0], parts[1] if len(parts) == 2 else None

    def _reorder(self, heads: Any, order: torch.Tensor | None) -> Any:
        """``[heads * head_dim, ...]``, or none, with the dimensions of each head in this order."""
        if heads is None or order is None:
            return heads
        return heads.unflatten(0, (-1, self._head_dim))[:, order.to(heads.device)].flatten(0, 1)


def _norm(layer: Any, name: str) -> torch.Tensor:
    """Empty where the layer has no such norm."""
    return getattr(layer, name).weight if name else torch.empty(0)


def _gate_of(layer: Any) -> str | None:
    function = getattr(layer.mlp, "act_fn", None) or getattr(layer.mlp, "activation_fn", None)
    return _GATES.get(type(function).__name__)


def _epsilon(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)
