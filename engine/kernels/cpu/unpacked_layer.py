"""A decoder layer on the CPU whose products are torch's, where the kernels have none for dtype or processor."""

import torch
from torch.nn.functional import gelu, linear

from engine.kernels.branched_layer import BranchedWeights
from engine.kernels.cpu.native_operations import NativeOperations
from engine.kernels.decoder_layer import LayerWeights
from engine.kernels.layer_by_layer import LayerState


class UnpackedLayer:
    """One layer of `LayerByLayer`; what is between the products is the kernels'."""

    def __init__(self, kernels: NativeOperations, weights: LayerWeights) -> None:
        self._kernels = kernels
        self._weights = weights
        self._gate_up = torch.cat([weights.gate, weights.up])
        self.operations = weights.operations

    def attention_norm(self, s: LayerState) -> None:
        s.normed = self._kernels.rms_norm(s.hidden, self._weights.attention_norm, self._weights.epsilon)

    def qkv(self, s: LayerState) -> None:
        s.qkv = linear(s.normed, *self._weights.qkv)

    def rotate_and_write_kv(self, s: LayerState) -> None:
        w = self._weights
        self._kernels.rotate_and_write_kv(
            s.qkv, *s.rotation, *s.caches, s.work, q_norm=w.q_norm, k_norm=w.k_norm, epsilon=w.epsilon
        )

    def attend(self, s: LayerState) -> None:
        self._attend(s, 0.0)

    def _attend(self, s: LayerState, softcap: float) -> None:
        w = self._weights
        query = s.qkv.view(len(s.qkv), -1, self._kernels.head_dim)[:, : self._kernels.num_q_heads]
        s.attended = self._kernels.attend(
            query, *s.caches, s.work, scale=w.scale, softcap=softcap, window=w.window
        ).flatten(1)

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
        s.hidden = linear(s.gated, self._weights.down).add_(s.hidden)


class UnpackedBranchedLayer(UnpackedLayer):
    """The same with the operations of `BranchedWeights`."""

    def __init__(self, kernels: NativeOperations, weights: BranchedWeights) -> None:
        super().__init__(kernels, weights)
        self._branched = weights

    def attention_input(self, s: LayerState) -> None:
        s.normed = self._normed(s.hidden, self._weights.attention_norm)

    def norm_heads(self, s: LayerState) -> None:
        q_size = self._kernels.num_q_heads * self._kernels.head_dim
        kv_size = self._kernels.num_kv_heads * self._kernels.head_dim
        for first, size, norm in (
            (0, q_size, self._branched.apart_q_norm),
            (q_size, kv_size, self._branched.apart_k_norm),
        ):
            assert norm is not None, "norms of both"
            part = s.qkv[:, first : first + size]
            part.copy_(self._normed(part.reshape(len(part), -1, len(norm)), norm).flatten(1))

    def rotate_and_write_kv(self, s: LayerState) -> None:
        first = self._branched.rotation * len(s.qkv)
        cos, sin = s.rotation
        s.rotation = cos[first : first + len(s.qkv)], sin[first : first + len(s.qkv)]
        super().rotate_and_write_kv(s)

    def attend(self, s: LayerState) -> None:
        self._attend(s, self._branched.softcap)

    def output_branch(self, s: LayerState) -> None:
        s.branch = linear(s.attended, *self._weights.output)

    def add_attention(self, s: LayerState) -> None:
        self._add_branch(s, self._branched.post_attention_norm)

    def mlp_input(self, s: LayerState) -> None:
        s.normed = self._normed(s.hidden, self._weights.mlp_norm)

    def gate_up_apart(self, s: LayerState) -> None:
        s.gated = linear(s.normed, self._gate_up)

    def activate(self, s: LayerState) -> None:
        gate, up = s.gated.chunk(2, dim=1)
        s.gated = gelu(gate, approximate="tanh") * up

    def down_branch(self, s: LayerState) -> None:
        s.branch = linear(s.gated, self._weights.down)

    def add_mlp(self, s: LayerState) -> None:
        self._add_branch(s, self._branched.post_mlp_norm)

    def _add_branch(self, s: LayerState, norm: torch.Tensor | None) -> None:
        branch = s.branch if norm is None else self._normed(s.branch, norm)
        s.hidden = s.hidden + branch * self._branched.multiplier

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm of the last dimension, computed in float32; `x` itself for an empty weight."""
        if not weight.numel():
            return x
        wide = x.float()
        factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._weights.epsilon)
        return (wide * factor * (weight.float() + self._branched.norm_offset)).to(x.dtype)


def make_unpacked_layer(kernels: NativeOperations, weights: LayerWeights) -> UnpackedLayer:
    """The layer of these weights."""
    if isinstance(weights, BranchedWeights):
        return UnpackedBranchedLayer(kernels, weights)
    return UnpackedLayer(kernels, weights)
