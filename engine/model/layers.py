"""What replaces parts of a transformers model: its attention, and where the backend brings its own, its layers.

Nothing that a model asks for is ignored. A keyword or a weight that changes the result and is not computed here raises
`ModelError`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from engine.errors import ModelError
from engine.kernels.decoder_layer import DecoderLayers, LayerWeights, Linear, OutputLayer
from engine.kv.kv_cache import KVCache
from engine.model.attention import AttentionBackend

ATTENTION_NAME = "batchloom"

_IGNORED = frozenset(["position_ids"])
"""The rotation has used the positions before attention is called."""

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "dropout": (None, 0.0),
    "is_causal": (None, True),
    "softcap": (None, 0.0),
    "use_cache": (None, False),
    "output_attentions": (None, False),
}
"""Values of a keyword that change nothing. Of all other keywords only None does."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStep:
    """What travels through the model's forward to every layer's attention.

    Attributes:
        work: from the backend's `prepare`.
        output_rows: int64 ``[R]``, the rows whose last hidden states somebody reads; None: all.
    """

    backend: AttentionBackend
    cache: KVCache
    work: Any
    output_rows: torch.Tensor | None = None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    attention_step: AttentionStep,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: causal attention over the step's KV.

    Args:
        module: the layer's attention.
        query: ``[1, num_q_heads, T, head_dim]``.
        key, value: ``[1, num_kv_heads, T, head_dim]``.
        attention_mask: None: who sees what is in the `AttentionBatch`.
        scaling: of the scores.
        keywords: whatever else the model passes.
    Raises:
        ModelError: the model asks for something that is not computed.
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    refuse_keywords(f"layer {layer}", keywords | {"attention_mask": attention_mask}, module.config)
    backend, work = attention_step.backend, attention_step.work
    k_cache, v_cache = attention_step.cache.keys[layer], attention_step.cache.values[layer]
    backend.write_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), k_cache, v_cache, work)
    out = backend.attend(query[0].transpose(0, 1), k_cache, v_cache, work, scale=scaling)
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, attend)
# No mask function is registered under this name. So transformers makes no mask, and does not look for packed sequences
# in the positions, which would make the host wait for the device in each step.


def refuse_keywords(where: str, keywords: Mapping[str, Any], config: Any) -> None:
    """Refuses keywords to attention that would change its result.

    Args:
        where: the layer, for the message.
        config: of the model; a sliding window as long as its context hides nothing.
    Raises:
        ModelError: a keyword has a value that is not neutral.
    """
    for name, value in keywords.items():
        if value is None or name in _IGNORED:
            continue
        if name == "sliding_window" and value >= config.max_position_embeddings:
            continue
        if isinstance(value, torch.Tensor):
            raise ModelError(f"{where}: attention with {name}=<tensor of shape {tuple(value.shape)}> is not supported")
        if value not in _NEUTRAL.get(name, ()):
            raise ModelError(f"{where}: attention with {name}={value!r} is not supported")


class ReplacedLayers(nn.Module):
    """All decoder layers of a transformers model as one, computed by the attention backend.

    The stock model still embeds, turns positions into angles, and norms the last hidden states.
    """

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
        past_key_values: None = None,
        use_cache: bool = False,
    ) -> torch.Tensor:
        """Computes the step's output rows, ``[1, R, hidden]``, and writes its KV.

        Args:
            hidden_states: ``[1, T, hidden]``.
            position_embeddings: cosines and sines, ``[1, T, head_dim]`` each.
            attention_step: the step's work, KV cache and output rows; the cache is written.
            attention_mask, position_ids, past_key_values, use_cache: what the supported families pass besides; ignored.
        """
        cos, sin = (angles[0].float().contiguous() for angles in position_embeddings)
        cache = attention_step.cache
        hidden = self._layers(
            hidden_states[0], cache.keys, cache.values, attention_step.work, cos, sin, attention_step.output_rows
        )
        return hidden.unsqueeze(0)


def read_weights(layer: Any, index: int) -> LayerWeights:
    """The weights of a transformers layer. The supported families differ by biases and by norms of the heads.

    Raises:
        ModelError: the layer has a parameter that no operation reads, or an attention that is not full and causal.
    """
    for name, _ in layer.named_parameters():
        if name not in _WEIGHTS:
            raise ModelError(f"layer {index}: the parameter {name} is not supported")
    attention, mlp = layer.self_attn, layer.mlp
    asked = {name: getattr(attention, name, None) for name in ("sliding_window", "is_causal")}
    refuse_keywords(f"layer {index}", asked, attention.config)
    has_head_norms = hasattr(attention, "q_norm")
    return LayerWeights(
        attention_norm=layer.input_layernorm.weight,
        qkv=_joined(attention.q_proj, attention.k_proj, attention.v_proj),
        output=(attention.o_proj.weight, attention.o_proj.bias),
        mlp_norm=layer.post_attention_layernorm.weight,
        gate=mlp.gate_proj.weight,
        up=mlp.up_proj.weight,
        down=mlp.down_proj.weight,
        q_norm=attention.q_norm.weight if has_head_norms else None,
        k_norm=attention.k_norm.weight if has_head_norms else None,
        epsilon=float(layer.input_layernorm.variance_epsilon),
        scale=float(attention.scaling),
    )


def _joined(*linears: nn.Linear) -> Linear:
    """Weights and biases of linear layers on the same input, as one layer's."""
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    return torch.cat([linear.weight for linear in linears]), bias


class TorchOutputLayer:
    """The checkpoint's own output layer (`engine.kernels.decoder_layer.OutputLayer`)."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear = linear
        self.bias = linear.bias

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(hidden)
        return logits

    def most_likely(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits(hidden).float().argmax(dim=-1)

    def weights_of(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.linear.weight[token_ids]


class TiedEmbedding(nn.Module):
    """Token embeddings read from an output layer that has the same weights."""

    def __init__(self, output_layer: OutputLayer) -> None:
        super().__init__()
        self._output_layer = output_layer

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 ``[1, T]`` -> ``[1, T, hidden]``."""
        return self._output_layer.weights_of(token_ids)
