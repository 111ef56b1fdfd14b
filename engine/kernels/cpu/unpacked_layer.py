"""A decoder layer on the CPU with torch's matrix products, where the C++ products lack its sizes."""

from dataclasses import fields, replace

import torch
from torch.nn.functional import gelu, layer_norm, linear, silu

from engine.kernels.branched_layer import BranchedWeights, Experts
from engine.kernels.cpu.native import NativeBackend
from engine.kernels.decoder_layer import LayerWeights
from engine.kernels.layer_by_layer import LayerState

_GELUS = {"gelu": "none", "gelu_tanh": "tanh"}


class UnpackedLayer:
    """A layer of `LayerByLayer`, as one operation; C++ kernels but for products and parts of `BranchedWeights`."""

    operations = ("compute",)

    def __init__(self, kernels: NativeBackend, weights: LayerWeights) -> None:
        self._kernels = kernels
        if not isinstance(weights, BranchedWeights):
            weights = BranchedWeights(**{field.name: getattr(weights, field.name) for field in fields(weights)})
        self._gate_up = torch.cat([weights.gate, weights.up])
        gate, up = self._gate_up[: len(weights.gate)], self._gate_up[len(weights.gate) :]
        self._weights = replace(weights, gate=gate, up=up)  # the caller frees its own

    def compute(self, s: LayerState) -> None:
        w, kernels = self._weights, self._kernels
        normed = self._norm_rows(s.hidden, w.attention_norm, w.attention_norm_bias)
        qkv = linear(normed, *w.qkv)
        self._norm_heads(qkv)
        first = w.rotation * len(qkv)
        cos, sin = (angles[first : first + len(qkv)] for angles in s.angles)
        kernels.rotate_and_write_kv(
            qkv, cos, sin, *s.caches, s.work, q_norm=w.q_norm, k_norm=w.k_norm, epsilon=w.epsilon
        )
        query = qkv.view(len(qkv), -1, kernels.head_dim)[:, : kernels.num_q_heads]
        attended, hidden = kernels.attend(query, *s.caches, s.work, w.scoring).flatten(1), s.hidden
        if s.output_rows is not None:
            attended, hidden, normed = (rows[s.output_rows] for rows in (attended, hidden, normed))
        hidden = self._add(hidden, linear(attended, *w.output), w.post_attention_norm)
        if not w.is_parallel:
            normed = self._norm_rows(hidden, w.mlp_norm, w.mlp_norm_bias)
        if w.experts is not None:
            branch = self._compute_experts(normed, w.experts)
        else:
            branch = linear(self._compute_gate(normed), w.down, w.down_bias)
        s.hidden = self._add(hidden, branch, w.post_mlp_norm)

    def _norm_heads(self, qkv: torch.Tensor) -> None:
        """Norms query and key heads in place where the kernel that rotates them does not."""
        first = 0
        for num_heads, norm in (
            (self._kernels.num_q_heads, self._weights.apart_q_norm),
            (self._kernels.num_kv_heads, self._weights.apart_k_norm),
        ):
            part = qkv[:, first : first + num_heads * self._kernels.head_dim]
            first += part.shape[1]
            if norm is not None:
                part.copy_(self._normed(part.reshape(len(part), -1, len(norm)), norm).flatten(1))

    def _compute_gate(self, normed: torch.Tensor) -> torch.Tensor:
        """The input of the feed-forward's second product."""
        w, gate_up = self._weights, linear(normed, self._gate_up)
        if w.gate_function == "silu" and w.gate_bias is None and w.is_gated:
            return self._kernels.swiglu(gate_up)
        gate, up = gate_up.tensor_split([len(w.gate)], dim=1)
        return self._activate(gate, up if w.is_gated else None, w.gate_bias, w.up_bias)

    def _route(self, normed: torch.Tensor, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each row and their weights, int64 and float32 ``[rows, slots]``; shared experts come last."""
        shape = len(normed), experts.num_shared
        shared = torch.arange(experts.num_experts, experts.num_experts + experts.num_shared).expand(shape)
        if not experts.num_experts:
            return shared, torch.ones(shape)
        logits = linear(normed.float(), experts.router.float())
        weights = torch.ones(shape)
        if experts.has_shared_gate:
            weights = logits[:, -1:].sigmoid().expand(shape)
            logits = logits[:, :-1]
        if experts.router_bias is not None:
            logits = logits + experts.router_bias.float()
        largest, chosen = logits.topk(experts.num_chosen, dim=1)
        total = (largest if experts.is_renormalised else logits).logsumexp(dim=1, keepdim=True)
        return torch.cat([chosen, shared], dim=1), torch.cat([(largest - total).exp(), weights], dim=1)

    def _compute_experts(self, normed: torch.Tensor, experts: Experts) -> torch.Tensor:
        """Computes each expert on all of its rows, and sums a row's results by its weights."""
        w, (chosen, weights) = self._weights, self._route(normed, experts)
        num_experts, num_slots = experts.num_experts + experts.num_shared, chosen.shape[1]
        gates, ups = self._gate_up.view(2, num_experts, -1, normed.shape[1])
        downs = w.down.view(num_experts, normed.shape[1], -1)
        biases = [
            None if bias is None else bias.view(num_experts, -1) for bias in (w.gate_bias, w.up_bias, w.down_bias)
        ]
        order = chosen.flatten().argsort()
        made = normed.new_empty(len(order), normed.shape[1])
        first = 0
        for expert, count in enumerate(chosen.flatten().bincount(minlength=num_experts).tolist()):
            if count:
                slots = order[first : first + count]
                gate_bias, up_bias, down_bias = (None if bias is None else bias[expert] for bias in biases)
                rows = normed[slots // num_slots]
                gated = self._activate(linear(rows, gates[expert]), linear(rows, ups[expert]), gate_bias, up_bias)
                made[slots] = linear(gated, downs[expert], down_bias)
                first += count
        return (made.view(*weights.shape, -1) * weights.unsqueeze(2)).sum(dim=1).to(normed.dtype)

    def _activate(
        self, gate: torch.Tensor, up: torch.Tensor | None, gate_bias: torch.Tensor | None, up_bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The activated rows; `up` is None where the feed-forward is not gated."""
        w = self._weights
        gate = gate if gate_bias is None else gate + gate_bias
        up = up if up is None or up_bias is None else up + up_bias
        if w.gate_function == "clamped":
            assert up is not None, "the clamped activation is gated"
            gate = gate.clamp(max=w.gate_limit)
            return gate * (w.gate_alpha * gate).sigmoid() * (up.clamp(-w.gate_limit, w.gate_limit) + 1)
        activated = silu(gate) if w.gate_function == "silu" else gelu(gate, approximate=_GELUS[w.gate_function])
        return activated if up is None else activated * up

    def _norm_rows(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._weights.is_centered:
            return layer_norm(x, weight.shape, weight, bias, self._weights.epsilon)
        if self._weights.norm_offset or not weight.numel():
            return self._normed(x, weight)
        return self._kernels.rms_norm(x, weight, self._weights.epsilon)

    def _add(self, hidden: torch.Tensor, branch: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        branch = branch if norm is None else self._normed(branch, norm)
        return (branch if self._weights.multiplier == 1 else branch * self._weights.multiplier).add_(hidden)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm over the last dimension, computed in float32; returns `x` for an empty weight."""
        if not weight.numel():
            return x
        wide = x.float()
        factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._weights.epsilon)
        return (wide * factor * (weight.float() + self._weights.norm_offset)).to(x.dtype)
