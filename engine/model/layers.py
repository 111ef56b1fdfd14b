"""Modules that replace a model's layers by those of the attention backend.

No weight of a layer is ignored: a parameter that the backend does not compute with raises `ModelError`.
"""

from typing import Any

import torch
from torch import nn

from engine.errors import ModelError
from engine.kernels.attention_backend import OutputLayer
from engine.kernels.decoder_layer import DecoderLayers, LayerWeights, Linear
from engine.model.attention import window_of
from engine.model.attention_step import AttentionStep

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

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_step: AttentionStep,
        attention_mask: None = None,
        position_ids: torch.Tensor | None = None,
        cache: None = None,
        past_key_values: None = None,
        use_cache: bool = False,
    ) -> torch.Tensor:
        """Computes the step's output rows, ``[1, R, hidden]``, and writes its KV.

        Args:
            hidden_states: ``[1, T, hidden]``.
            position_embeddings: cosines and sines, ``[1, T, head_dim]`` each.
            attention_step: the step's work, KV cache and output rows; the cache is written.
            others: what models pass to each layer; not used. `cache` is past_key_values since transformers 5.24.
        """
        cos, sin = (angles[0].float().contiguous() for angles in position_embeddings)
        kv = attention_step.cache
        hidden = self._layers(
            hidden_states[0], kv.keys, kv.values, attention_step.works[0], cos, sin, attention_step.output_rows
        )
        return hidden.unsqueeze(0)


def read_weights(layer: Any, index: int) -> LayerWeights:
    """The weights of a plain layer; plain families differ only in biases and in norms of the heads. Raises `ModelError`
    if the layer has a parameter that no operation reads, or its attention is not causal."""
    for name, _ in layer.named_parameters():
        if name not in _WEIGHTS:
            raise ModelError(f"layer {index}: the parameter {name} is not supported")
    attention, mlp = layer.self_attn, layer.mlp
    if not attention.is_causal:
        raise ModelError(f"layer {index}: attention with is_causal=False is not supported; encoders: EncoderEngine")
    has_head_norms = hasattr(attention, "q_norm")
    return LayerWeights(
        attention_norm=layer.input_layernorm.weight,
        qkv=join_linears(attention.q_proj, attention.k_proj, attention.v_proj),
        output=(attention.o_proj.weight, attention.o_proj.bias),
        mlp_norm=layer.post_attention_layernorm.weight,
        gate=mlp.gate_proj.weight,
        up=mlp.up_proj.weight,
        down=mlp.down_proj.weight,
        q_norm=attention.q_norm.weight if has_head_norms else None,
        k_norm=attention.k_norm.weight if has_head_norms else None,
        epsilon=float(layer.input_layernorm.variance_epsilon),
        scale=float(attention.scaling),
        window=window_of(sliding_window_of(attention), attention.config),
        all_reduce=getattr(attention.o_proj, "all_reduce", None),
    )


def sliding_window_of(attention: Any) -> int | None:
    """The window of a layer's attention: its own attribute where layers differ (qwen2, qwen3), else the config's."""
    window: int | None = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    return window


def join_linears(*linears: nn.Linear) -> Linear:
    """Linear layers with the same input, concatenated into one."""
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    return torch.cat([linear.weight for linear in linears]), bias


class TiedEmbedding(nn.Module):
    """Token embeddings, read from the output layer, which has the same weights."""

    def __init__(self, output_layer: OutputLayer) -> None:
        super().__init__()
        self._output_layer = output_layer

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 ``[1, T]`` -> ``[1, T, hidden]``."""
        return self._output_layer.weights_of(token_ids)
