"""The decoder layers on the CPU kernels: stock weights, fused projections.

They take the place of transformers' own inside the stock model, which still embeds, turns positions into angles and
norms the last hidden states. The supported families (`supported_models`) share them but for biases and the
norms of query and key heads.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.kernels.cpu.native import NativeKernels, NativeWork
from engine.kernels.cpu.packed_layers import PackedLayer, PackedLayers
from engine.kv.kv_cache import KVCache


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeStep:
    """What travels through the model's forward to the native layers.

    Attributes:
        output_rows: int64 ``[R]``, the rows whose last hidden states somebody reads.
    """

    cache: KVCache
    work: NativeWork
    output_rows: torch.Tensor


class NativeLayers(nn.Module):
    """All layers as if they were one: hidden ``[1, T, hidden]`` in, the step's output rows ``[1, R, hidden]`` out.

    The step's KV is written on the way. Where the CPU multiplies bf16 they are one call of the kernels; else products
    are torch's, and what is between them the kernels'. The last layer is computed for the output rows alone from its
    attention on: of prompts that is one row each, none of a shared prefix, so most of its products are saved.

    Args:
        layers: the transformers layers whose weights they take, one after the other.
    """

    def __init__(self, layers: Iterable[Any], kernels: NativeKernels) -> None:
        super().__init__()
        taken = [_pack(layer, kernels) or _UnpackedLayer(layer, kernels) for layer in layers]
        packed = [layer for layer in taken if isinstance(layer, PackedLayer)]
        self._unpacked = [layer for layer in taken if isinstance(layer, _UnpackedLayer)]
        assert not (packed and self._unpacked), "layers of different shapes"
        self._packed = PackedLayers(kernels, packed) if packed else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_step: NativeStep,
        **_: Any,
    ) -> torch.Tensor:
        step, hidden = attention_step, hidden_states[0]
        keys, values = step.cache.keys, step.cache.values
        cos, sin = (angles[0].float().contiguous() for angles in position_embeddings)
        if self._packed is not None:
            return self._packed(hidden, keys, values, step.work, cos, sin, step.output_rows).unsqueeze(0)
        for index, layer in enumerate(self._unpacked):
            output_rows = step.output_rows if index == len(self._unpacked) - 1 else None
            hidden = layer(hidden, (cos, sin), (keys[index], values[index]), step.work, output_rows)
        return hidden.unsqueeze(0)


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
        """As `PackedLayers`, of one layer, and not in place."""
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
