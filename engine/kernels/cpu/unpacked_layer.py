"""A decoder layer on the CPU with torch's matrix products, where the C++ products lack its sizes."""

from dataclasses import fields, replace

import torch
from torch.nn.functional import gelu, layer_norm, linear, silu

from engine.kernels.branched_layer import BranchedWeights
from engine.kernels.cpu.native import NativeBackend
from engine.kernels.decoder_layer import LayerWeights
from engine.kernels.layer_by_layer import LayerState

_GELUS = {"gelu": "none", "gelu_tanh": "tanh"}


class UnpackedLayer:
    """One layer of `LayerByLayer`. All operations but the products are C++ kernels; those that only `BranchedWeights`
    have are torch's."""

    def __init__(self, kernels: NativeBackend, weights: LayerWeights) -> None:
        self._kernels = kernels
        if not isinstance(weights, BranchedWeights):
            weights = BranchedWeights(**{field.name: getattr(weights, field.name) for field in fields(weights)})
        self._gate_up = torch.cat([weights.gate, weights.up])
        gate, up = self._gate_up[: len(weights.gate)], self._gate_up[len(weights.gate) :]
        self._weights = replace(weights, gate=gate, up=up)  # the caller frees its own
        self.operations = weights.operations

    def attention_norm(self, s: LayerState) -> None:
        s.normed = self._kernels.rms_norm(s.hidden, self._weights.attention_norm, self._weights.epsilon)

    def qkv(self, s: LayerState) -> None:
        s.qkv = linear(s.normed, *self._weights.qkv)

    def rotate_and_write_kv(self, s: LayerState) -> None:
        w, first = self._weights, self._weights.rotation * len(s.qkv)
        cos, sin = (angles[first : first + len(s.qkv)] for angles in s.angles)
        self._kernels.rotate_and_write_kv(
            s.qkv, cos, sin, *s.caches, s.work, q_norm=w.q_norm, k_norm=w.k_norm, epsilon=w.epsilon
        )

    def attend(self, s: LayerState) -> None:
        query = s.qkv.view(len(s.qkv), -1, self._kernels.head_dim)[:, : self._kernels.num_q_heads]
        s.attended = self._kernels.attend(query, *s.caches, s.work, self._weights.scoring).flatten(1)

    def select_rows(self, s: LayerState) -> None:
        if s.output_rows is not None:
            s.attended, s.hidden = s.attended[s.output_rows], s.hidden[s.output_rows]

    def output(self, s: LayerState) -> None:
        s.hidden = linear(s.attended, *self._weights.output).add_(s.hidden)

    def mlp_norm(self, s: LayerState) -> None:
        s.normed = self._kernels.rms_norm(s.hidden, self._weights.mlp_norm, self._weights.epsilon)

    def gate_up(self, s: LayerState) -> None:
        s.gated = self._kernels.swiglu(linear(s.normed, self._gate_up))

    def down(self, s: LayerState) -> None:
        self.down_branch(s)
        s.hidden = s.branch.add_(s.hidden)

    def attention_input(self, s: LayerState) -> None:
        s.normed = self._norm_rows(s.hidden, self._weights.attention_norm, self._weights.attention_norm_bias)

    def norm_heads(self, s: LayerState) -> None:
        q_size = self._kernels.num_q_heads * self._kernels.head_dim
        kv_size = self._kernels.num_kv_heads * self._kernels.head_dim
        for first, size, norm in (
            (0, q_size, self._weights.apart_q_norm),
            (q_size, kv_size, self._weights.apart_k_norm),
        ):
            assert norm is not None, "query and key heads are normed both or neither"
            part = s.qkv[:, first : first + size]
            part.copy_(self._normed(part.reshape(len(part), -1, len(norm)), norm).flatten(1))

    def select_normed_rows(self, s: LayerState) -> None:
        self.select_rows(s)
        if s.output_rows is not None:
            s.normed = s.normed[s.output_rows]

    def output_branch(self, s: LayerState) -> None:
        s.branch = linear(s.attended, *self._weights.output)

    def add_attention(self, s: LayerState) -> None:
        self._add_branch(s, self._weights.post_attention_norm)

    def mlp_input(self, s: LayerState) -> None:
        s.normed = self._norm_rows(s.hidden, self._weights.mlp_norm, self._weights.mlp_norm_bias)

    def activate(self, s: LayerState) -> None:
        w = self._weights
        gate, up = linear(s.normed, self._gate_up).tensor_split([len(w.gate)], dim=1)
        s.gated = self._activate(gate, up if w.is_gated else None, w.gate_bias, w.up_bias)

    def down_branch(self, s: LayerState) -> None:
        s.branch = linear(s.gated, self._weights.down, self._weights.down_bias)

    def route(self, s: LayerState) -> None:
        """Chooses the experts of each row and their weights, ``[rows, slots]``; shared experts come last."""
        experts = self._weights.experts
        assert experts is not None, "layers without experts are not routed"
        shape = len(s.normed), experts.num_shared
        s.experts = torch.arange(experts.num_experts, experts.num_experts + experts.num_shared).expand(shape)
        s.weights = torch.ones(shape, dtype=torch.float32)
        if not experts.num_experts:
            return
        logits = linear(s.normed.float(), experts.router.float())
        if experts.has_shared_gate:
            s.weights = logits[:, -1:].sigmoid().expand(shape)
            logits = logits[:, :-1]
        if experts.router_bias is not None:
            logits = logits + experts.router_bias.float()
        largest, chosen = logits.topk(experts.num_chosen, dim=1)
        total = (largest if experts.is_renormalised else logits).logsumexp(dim=1, keepdim=True)
        s.experts = torch.cat([chosen, s.experts], dim=1)
        s.weights = torch.cat([(largest - total).exp(), s.weights], dim=1)

    def experts(self, s: LayerState) -> None:
        """Computes each expert on all of its rows, and sums a row's results by its weights."""
        w, num_slots = self._weights, s.experts.shape[1]
        assert w.experts is not None, "layers without experts are not routed"
        num_experts = w.experts.num_experts + w.experts.num_shared
        gates, ups = self._gate_up.view(2, num_experts, -1, s.normed.shape[1])
        downs = w.down.view(num_experts, s.normed.shape[1], -1)
        biases = [
            None if bias is None else bias.view(num_experts, -1) for bias in (w.gate_bias, w.up_bias, w.down_bias)
        ]
        order = s.experts.flatten().argsort()
        made = s.normed.new_empty(len(order), s.normed.shape[1])
        first = 0
        for expert, count in enumerate(s.experts.flatten().bincount(minlength=num_experts).tolist()):
            if count:
                slots = order[first : first + count]
                gate_bias, up_bias, down_bias = (None if bias is None else bias[expert] for bias in biases)
                rows = s.normed[slots // num_slots]
                gated = self._activate(linear(rows, gates[expert]), linear(rows, ups[expert]), gate_bias, up_bias)
                made[slots] = linear(gated, downs[expert], down_bias)
                first += count
        s.branch = (made.unflatten(0, s.weights.shape) * s.weights.unsqueeze(2)).sum(dim=1).to(s.normed.dtype)

    def add_mlp(self, s: LayerState) -> None:
        self._add_branch(s, self._weights.post_mlp_norm)

    def _activate(
        self, gate: torch.Tensor, up: torch.Tensor | None, gate_bias: torch.Tensor | None, up_bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The input of the feed-forward's second product; `up` is None where the feed-forward is not gated."""
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
        return self._normed(x, weight)

    def _add_branch(self, s: LayerState, norm: torch.Tensor | None) -> None:
        branch = s.branch if norm is None else self._normed(s.branch, norm)
        s.hidden = s.hidden + branch * self._weights.multiplier

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm over the last dimension, computed in float32; returns `x` for an empty weight."""
        if not weight.numel():
            return x
        wide = x.float()
        factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._weights.epsilon)
        return (wide * factor * (weight.float() + self._weights.norm_offset)).to(x.dtype)
