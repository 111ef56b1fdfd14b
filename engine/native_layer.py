"""A decoder layer on the CPU kernels: stock weights, fused projections, everything between the products native.

It takes the place of a transformers decoder layer inside the stock model, which still embeds, rotates positions and
norms. The supported families (see `engine.supported_models`) share this layer but for biases and the norms
of query and key heads.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.kernels.native import NativeKernels, NativeWork
from engine.kv_cache import KVCache


@dataclass(slots=True)
class Rotation:
    """Cosines and sines of one step's positions as float32, made by the first layer for all."""

    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None

    def of(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.cos is None or self.sin is None:
            self.cos, self.sin = cos[0].float().contiguous(), sin[0].float().contiguous()
        return self.cos, self.sin


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeStep:
    """What travels through the model's forward to every native layer.

    Attributes:
        output_rows: int64 ``[R]``, the rows whose last hidden states somebody reads.
    """

    cache: KVCache
    work: NativeWork
    rotation: Rotation
    output_rows: torch.Tensor


class _Projection:
    """One or several linear layers on the same input as one product, by our kernels where the CPU multiplies bf16."""

    __slots__ = ("_bias", "_kernels", "_packed", "_weight")

    def __init__(self, kernels: NativeKernels, *linears: nn.Linear) -> None:
        weight = torch.cat([linear.weight for linear in linears])
        self._bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
        self._kernels = kernels
        self._packed = kernels.pack(weight, self._bias)
        self._weight = weight if self._packed is None else None

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The product, plus the residual stream where one is given."""
        if self._packed is not None:
            return self._kernels.project(x, self._packed, residual)
        assert self._weight is not None
        out = nn.functional.linear(x, self._weight, self._bias)
        return out if residual is None else out.add_(residual)


class _GatedProjection:
    """silu(gate) * up of two linear layers on the same input."""

    __slots__ = ("_both", "_kernels", "_packed")

    def __init__(self, kernels: NativeKernels, gate: nn.Linear, up: nn.Linear) -> None:
        self._kernels = kernels
        self._packed = kernels.pack_gated(gate.weight, up.weight)
        self._both = None if self._packed is not None else torch.cat([gate.weight, up.weight])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return self._kernels.project(x, self._packed)
        assert self._both is not None
        return self._kernels.swiglu(nn.functional.linear(x, self._both))


class NativeLayer(nn.Module):
    """One layer: hidden ``[1, T, hidden]`` in and out; the step's KV is written on the way.

    Args:
        layer: the transformers layer whose weights it takes.
        index: of the layer, and of its KV.
        is_last: whether nothing but the step's output rows ``[1, R, hidden]`` is wanted of it. Of prompts that is one
            row each, none of a shared prefix, so most of the layer's products are saved.
    """

    def __init__(self, layer: Any, index: int, kernels: NativeKernels, *, is_last: bool) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._index = index
        self._is_last = is_last
        self._kernels = kernels
        self._scale = float(attention.scaling)
        self._qkv = _Projection(kernels, attention.q_proj, attention.k_proj, attention.v_proj)
        self._output = _Projection(kernels, attention.o_proj)
        self._gate_up = _GatedProjection(kernels, mlp.gate_proj, mlp.up_proj)
        self._down = _Projection(kernels, mlp.down_proj)
        self._attention_norm, self._mlp_norm = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        # Only some families have them; their epsilons are one.
        has_head_norms = hasattr(attention, "q_norm")
        self._q_norm: torch.Tensor | None
        self._q_norm, self._head_epsilon = _norm(attention.q_norm) if has_head_norms else (None, 0.0)
        self._k_norm = _norm(attention.k_norm)[0] if has_head_norms else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_step: NativeStep,
        **_: Any,
    ) -> torch.Tensor:
        kernels, work = self._kernels, attention_step.work
        k_cache, v_cache = attention_step.cache.keys[self._index], attention_step.cache.values[self._index]
        hidden = hidden_states[0]
        qkv = self._qkv(kernels.rms_norm(hidden, *self._attention_norm))
        kernels.rotate_and_store(
            *(qkv, *attention_step.rotation.of(*position_embeddings), k_cache, v_cache, work),
            q_norm=self._q_norm,
            k_norm=self._k_norm,
            epsilon=self._head_epsilon,
        )
        attended = kernels.attend(qkv, k_cache, v_cache, work, scale=self._scale)
        if self._is_last:
            attended, hidden = (kernels.copy_rows(x, attention_step.output_rows) for x in (attended, hidden))
        hidden = self._output(attended, hidden)
        gated = self._gate_up(kernels.rms_norm(hidden, *self._mlp_norm))
        return self._down(gated, hidden).unsqueeze(0)


def _norm(module: Any) -> tuple[torch.Tensor, float]:
    return module.weight.detach(), float(module.variance_epsilon)
