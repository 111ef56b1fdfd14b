"""The decoder layers on a GPU: torch's products, and between them the Triton launches; 9 or 10 launches a layer.

The additions to the residual stream are deferred to the norm that follows; the last one is part of its product.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from engine.kernels.decoder_layer import DECODER_LAYER, LayerWeights
from engine.kernels.triton.device_work import DeviceWork
from engine.kernels.triton.layer_kernels import add_rms_norm, rotate_and_write_kv, swiglu

if TYPE_CHECKING:
    from engine.kernels.triton.triton_attention import TritonAttention


@dataclass(slots=True, kw_only=True)
class _LayerState:
    """A step on its way through one layer: what each operation reads and leaves. Tensors are ``[rows, columns]``.

    Attributes:
        hidden: the residual stream, without addend.
        addend: what the next norm adds to it; None: nothing.
        query: ``[T, num_q_heads, head_dim]``.
    """

    hidden: torch.Tensor
    addend: torch.Tensor | None
    caches: tuple[torch.Tensor, torch.Tensor]
    work: DeviceWork
    rotation: tuple[torch.Tensor, torch.Tensor]
    output_rows: torch.Tensor | None
    is_last: bool
    normed: torch.Tensor = field(init=False)
    qkv: torch.Tensor = field(init=False)
    query: torch.Tensor = field(init=False)
    attended: torch.Tensor = field(init=False)
    gated: torch.Tensor = field(init=False)


class _GpuLayer:
    """One layer. An operation drops what nobody reads after it, so that the next one can have its memory."""

    def __init__(self, attention: "TritonAttention", weights: LayerWeights) -> None:
        self._attention = attention
        self._gate_up = torch.cat([weights.gate, weights.up])
        gate, up = self._gate_up.chunk(2)  # in place of the separate weights, which can then be freed
        self._weights = replace(weights, gate=gate, up=up)
        self._operations = [getattr(self, name) for name in DECODER_LAYER]

    def __call__(self, state: _LayerState) -> None:
        for operation in self._operations:
            operation(state)

    def attention_norm(self, s: _LayerState) -> None:
        w = self._weights
        s.hidden, s.normed = add_rms_norm(s.hidden, w.attention_norm, w.epsilon, addend=s.addend)

    def qkv(self, s: _LayerState) -> None:
        s.qkv = linear(s.normed, *self._weights.qkv)
        del s.normed

    def rotate_and_write_kv(self, s: _LayerState) -> None:
        w = self._weights
        s.query = rotate_and_write_kv(
            s.qkv, *s.rotation, *s.caches, s.work.slots,
            num_q_heads=self._attention.num_q_heads, q_norm=w.q_norm, k_norm=w.k_norm, epsilon=w.epsilon,
        )  # fmt: skip
        del s.qkv

    def attend(self, s: _LayerState) -> None:
        s.attended = self._attention.attend(s.query, *s.caches, s.work, scale=self._weights.scale).flatten(1)
        del s.query

    def select_rows(self, s: _LayerState) -> None:
        """The rows of the residual stream are selected by mlp_norm."""
        if s.output_rows is not None:
            s.attended = s.attended.index_select(0, s.output_rows)

    def output(self, s: _LayerState) -> None:
        s.addend = linear(s.attended, *self._weights.output)
        del s.attended

    def mlp_norm(self, s: _LayerState) -> None:
        w = self._weights
        s.hidden, s.normed = add_rms_norm(s.hidden, w.mlp_norm, w.epsilon, addend=s.addend, rows=s.output_rows)
        s.addend = None

    def gate_up(self, s: _LayerState) -> None:
        s.gated = swiglu(linear(s.normed, self._gate_up))
        del s.normed

    def down(self, s: _LayerState) -> None:
        if s.is_last:
            s.hidden.addmm_(s.gated, self._weights.down.t())
        else:
            s.addend = linear(s.gated, self._weights.down)


class GpuLayers:
    """`engine.kernels.decoder_layer.DecoderLayers` on a GPU.

    Args:
        attention: of the same model and device.
        weights: taken one after the other, so that the caller can free each layer before the next one is copied.
    """

    def __init__(self, attention: "TritonAttention", weights: Iterable[LayerWeights]) -> None:
        self._layers = [_GpuLayer(attention, layer) for layer in weights]

    def __call__(
        self,
        hidden: torch.Tensor,
        k_caches: Sequence[torch.Tensor],
        v_caches: Sequence[torch.Tensor],
        work: DeviceWork,
        cos: torch.Tensor,
        sin: torch.Tensor,
        output_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        addend: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            is_last = index == len(self._layers) - 1
            state = _LayerState(
                hidden=hidden,
                addend=addend,
                caches=(k_caches[index], v_caches[index]),
                work=work,
                rotation=(cos, sin),
                output_rows=output_rows if is_last else None,
                is_last=is_last,
            )
            layer(state)
            hidden, addend = state.hidden, state.addend
        return hidden
