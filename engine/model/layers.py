"""Modules that replace a model's layers by those of the attention backend.

No weight of a layer is ignored: a parameter that the backend does not compute with raises `ModelError`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from engine.errors import ModelError
from engine.kernels.attention_backend import OutputLayer
from engine.kernels.decoder_layer import DecoderLayers, LayerWeights, Linear, TabledWork
from engine.kernels.scoring import Scoring
from engine.model.attention_step import AttentionStep
from engine.model.layer_windows import find_windows

_WEIGHTS = frozenset(
    [
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        *(f"self_attn.{name}_proj.{kind}" for name in "qkvo" for kind in ("weight", "bias")),
        *(f"self_attn.{name}_norm.weight" for name in "qk"),
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    ]
)
"""The parameters of a layer that `read_weights` reads."""


class ReplacedLayers(nn.Module):
    """The attention backend's layers as one module, in place of all decoder layers. The model still computes
    embeddings, rotary angles and, unless the backend does, the final norm."""

    def __init__(self, layers: DecoderLayers) -> None:
        super().__init__()
        self._layers = layers

    def forward(self, hidden_states: torch.Tensor, *, attention_step: AttentionStep, **others: Any) -> torch.Tensor:
        """Computes the step's output rows, ``[1, R, hidden]``, and writes its KV.

        Args:
            hidden_states: ``[1, T, hidden]``.
            attention_step: the step's work, KV cache and output rows; the cache is written.
            others: what models pass to each layer: `position_embeddings`, cosines and sines ``[1, T, head_dim]``;
                `position_ids`, int64 ``[1, T]``.
        """
        angles, rows = self.angles(hidden_states, others), hidden_states[0].contiguous()
        kv = attention_step.cache
        work = TabledWork(attention_step.works, kv.layout.tables)
        return self._layers(rows, (kv.keys, kv.values), work, angles, attention_step.output_rows).unsqueeze(0)

    def angles(self, hidden_states: torch.Tensor, others: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the rows' positions, float32 ``[T, head_dim]``; arguments as of `forward`."""
        cos, sin = (angles[0].float().contiguous() for angles in others["position_embeddings"])
        return cos, sin


def read_weights(layer: Any, index: int) -> LayerWeights:
    """The weights of a plain layer; plain families differ only in biases and in norms of the heads. Raises `ModelError`
    if the layer has a parameter that no operation reads, or its attention is not causal."""
    for name, _ in layer.named_parameters():
        if name not in _WEIGHTS:
            raise ModelError(f"layer {index}: the parameter {name} is not supported")
    attention, mlp = layer.self_attn, layer.mlp
    if not attention.is_causal:
        raise ModelError(f"layer {index}: attention with is_causal=False is not supported; encoders: EncoderEngine")
    return LayerWeights(
        attention_norm=layer.input_layernorm.weight,
        qkv=join_linears(attention.q_proj, attention.k_proj, attention.v_proj),
        output=(attention.o_proj.weight, attention.o_proj.bias),
        mlp_norm=layer.post_attention_layernorm.weight,
        gate=mlp.gate_proj.weight,
        up=mlp.up_proj.weight,
        down=mlp.down_proj.weight,
        q_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        k_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        epsilon=float(layer.input_layernorm.variance_epsilon),
        scoring=Scoring(scale=float(attention.scaling), window=layer_window(attention.config, index)),
        all_reduce=getattr(attention.o_proj, "all_reduce", None),
    )


def layer_window(config: Any, index: int) -> int:
    """The `window` of a layer's `Scoring`, by the text model's config: see `find_windows`."""
    windows = find_windows(config.to_dict()) if getattr(config, "sliding_window", None) else ()
    return windows[index] if windows else 0


def join_linears(*linears: nn.Linear) -> Linear:
    """Linear layers with the same input, concatenated into one."""
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    weights = [linear.weight for linear in linears]
    if weights[0].is_meta:  # torch.cat would import what it computes such sizes with, for a second
        return weights[0].new_empty(sum(map(len, weights)), weights[0].shape[1]), bias
    return torch.cat(weights), bias


class TiedEmbedding(nn.Module):
    """Token embeddings, read from an output layer, which has the same weights; times the family's `scale`, if any."""

    def __init__(self, output_layer: OutputLayer, scale: torch.Tensor | None = None) -> None:
        super().__init__()
        self._output_layer, self._scale = output_layer, scale

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 ``[1, T]`` -> ``[1, T, hidden]``."""
        embeddings = self._output_layer.weights_of(token_ids)
        return embeddings if self._scale is None else embeddings * self._scale
