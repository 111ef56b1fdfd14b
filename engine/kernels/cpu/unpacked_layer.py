"""A decoder layer on the CPU whose products are torch's, where the kernels have none for dtype or processor."""

import torch
from torch.nn.functional import linear

from engine.kernels.cpu.native import NativeKernels
from engine.kernels.decoder_layer import LayerWeights
from engine.kernels.layer_by_layer import LayerState


class UnpackedLayer:
    """One layer of `LayerByLayer` whose products are torch's, and what is between them the kernels'."""

    def __init__(self, kernels: NativeKernels, weights: LayerWeights) -> None:
        self._kernels = kernels
        self._weights = weights
        self._gate_up = torch.cat([weights.gate, weights.up])

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
        w = self._weights
        query = s.qkv.view(len(s.qkv), -1, self._kernels.head_dim)[:, : self._kernels.num_q_heads]
        s.attended = self._kernels.attend(query, *s.caches, s.work, scale=w.scale, window=w.window).flatten(1)

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
