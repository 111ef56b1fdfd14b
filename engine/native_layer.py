"""A decoder layer on the CPU kernels: stock weights, fused projections.

It takes the place of a transformers decoder layer inside the stock model, which still embeds, turns positions into
angles and norms the last hidden states. The supported families (see `engine.supported_models`) share it but for biases
and the norms of query and key heads.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.kernels.native import NativeKernels, NativeWork
from engine.kernels.packed_layer import LayerCall, PackedLayer
from engine.kv_cache import KVCache


@dataclass(slots=True, kw_only=True)
class NativeStep:
    """What travels through the model's forward to every native layer.

    Attributes:
        output_rows: int64 ``[R]``, the rows whose last hidden states somebody reads.
        rotation: cosines and sines of the step's positions, float32 ``[T, head_dim]``, made by the first layer for all.
        call: likewise, what layers of packed weights are called with.
    """

    cache: KVCache
    work: NativeWork
    output_rows: torch.Tensor
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None
    call: LayerCall | None = None

    def rotate(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The step's rotation, of the model's cosines and sines ``[1, T, head_dim]``."""
        if self.rotation is None:
            self.rotation = cos[0].float().contiguous(), sin[0].float().contiguous()
        return self.rotation


class NativeLayer(nn.Module):
    """One layer: hidden ``[1, T, hidden]`` in and out; the step's KV is written on the way.

    Where the CPU multiplies bf16 it is one call of the kernels; else products are torch's, and what is between them the
    kernels'.

    Args:
        layer: the transformers layer whose weights it takes.
        index: of the layer, and of its KV.
        is_last: whether nothing but the step's output rows ``[1, R, hidden]`` is wanted of it. Of prompts that is one
            row each, none of a shared prefix, so most of the layer's products are saved.
    """

    def __init__(self, layer: Any, index: int, kernels: NativeKernels, *, is_last: bool) -> None:
        super().__init__()
        self._index = index
        self._is_last = is_last
        self._packed = _pack(layer, kernels)
        self._unpacked = _UnpackedLayer(layer, kernels) if self._packed is None else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_step: NativeStep,
        **_: Any,
    ) -> torch.Tensor:
        step, hidden = attention_step, hidden_states[0]
        rotation = step.rotate(*position_embeddings)
        caches = step.cache.keys[self._index], step.cache.values[self._index]
        output_rows = step.output_rows if self._is_last else None
        if self._packed is not None:
            if step.call is None:
                step.call = self._packed.call(step.work, *rotation)
            out = self._packed(step.call, hidden, *caches, output_rows)
        else:
            assert self._unpacked is not None
            out = self._unpacked(hidden, rotation, caches, step.work, output_rows)
        return out.unsqueeze(0)


class _UnpackedLayer:
    """A layer whose products are torch's."""

    def __init__(self, layer: Any, kernels: NativeKernels) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._kernels = kernels
        self._scale = float(attention.scaling)
        self._qkv = _join(attention.q_proj, attention.k_proj, attention.v_proj)
        self._output = _join(attention.o_proj)
        self._gate_up = _join(mlp.gate_proj, mlp.up_proj)
        self._down = _join(mlp.down_proj)
        self._attention_norm, self._mlp_norm = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        self._head_norms = _head_norms(attention)
        self._epsilon = _epsilon(layer)

    def __call__(
        self,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        caches: tuple[torch.Tensor, torch.Tensor],
        work: NativeWork,
        output_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """As `PackedLayer`, not in place."""
        kernels, epsilon, linear = self._kernels, self._epsilon, nn.functional.linear
        qkv = linear(kernels.rms_norm(hidden, self._attention_norm, epsilon), *self._qkv)
        q_norm, k_norm = self._head_norms
        kernels.rotate_and_store(qkv, *rotation, *caches, work, q_norm=q_norm, k_norm=k_norm, epsilon=epsilon)
        attended = kernels.attend(qkv, *caches, work, scale=self._scale)
        if output_rows is not None:
            attended, hidden = attended[output_rows], hidden[output_rows]
        hidden = linear(attended, *self._output).add_(hidden)
        gate_up = linear(kernels.rms_norm(hidden, self._mlp_norm, epsilon), *self._gate_up)
        return linear(kernels.swiglu(gate_up), *self._down).add_(hidden)


def _pack(layer: Any, kernels: NativeKernels) -> PackedLayer | None:
    """None where the kernels have no products, or not of the layer's shape."""
    if not kernels.has_products:
        return None
    attention, mlp = layer.self_attn, layer.mlp
    qkv = kernels.pack(*_join(attention.q_proj, attention.k_proj, attention.v_proj))
    output, down = kernels.pack(*_join(attention.o_proj)), kernels.pack(*_join(mlp.down_proj))
    gate_up = kernels.pack_gated(mlp.gate_proj.weight, mlp.up_proj.weight)
    if qkv is None or output is None or gate_up is None or down is None:
        return None
    q_norm, k_norm = _head_norms(attention)
    return PackedLayer(
        kernels,
        attention_norm=layer.input_layernorm.weight,
        qkv=qkv,
        output=output,
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=gate_up,
        down=down,
        q_norm=q_norm,
        k_norm=k_norm,
        epsilon=_epsilon(layer),
        scale=float(attention.scaling),
    )


def _join(*linears: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights and biases of linear layers on the same input, as one layer's."""
    if len(linears) == 1:
        return linears[0].weight, linears[0].bias
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    return torch.cat([linear.weight for linear in linears]), bias


def _head_norms(attention: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Weights of the norms of query and key heads, which only some families have."""
    return (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else (None, None)


def _epsilon(layer: Any) -> float:
    """Of all the layer's norms."""
    return float(layer.input_layernorm.variance_epsilon)
