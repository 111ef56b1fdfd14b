"""Packed layers of families that differ from Llama's (`engine.kernels.branched_layer`)."""

from typing import TYPE_CHECKING

import torch

from engine.kernels.branched_layer import BranchedWeights
from engine.kernels.cpu.native import NativeKernels, PackedWeight
from engine.kernels.decoder_layer import LayerWeights

if TYPE_CHECKING:
    from engine.kernels.cpu.native_layers import PackedLayer


def pack_gate_up(kernels: NativeKernels, layer: LayerWeights) -> PackedWeight | None:
    """Gate and up as one product, beside each other where the gate is not the kernels' own; None as for `pack`."""
    assert isinstance(layer, BranchedWeights), "layers of another kind"
    if layer.gate_function == "silu":
        return kernels.pack_gated(layer.gate, layer.up)
    return kernels.pack(torch.cat([layer.gate, layer.up]))


def complete(packed: "PackedLayer", layer: LayerWeights) -> None:
    """Fills in what cpp/layer.h has besides the fields of all layers.

    Args:
        packed: written.
        layer: its weights.
    """
    assert isinstance(layer, BranchedWeights), "layers of another kind"
    norms = {
        "post_attention_norm": layer.post_attention_norm,
        "post_mlp_norm": layer.post_mlp_norm,
        "apart_q_norm": layer.apart_q_norm,
        "apart_k_norm": layer.apart_k_norm,
    }
    for name, norm in norms.items():
        setattr(packed, name, None if norm is None else norm.data_ptr())
    packed.tensors = (*packed.tensors, *norms.values())
    settings = {
        "rotation": layer.rotation,
        "has_wide_norms": layer.has_wide_norms,
        "norm_offset": layer.norm_offset,
        "softcap": layer.softcap,
        "multiplier": layer.multiplier,
    }
    for name, value in settings.items():
        setattr(packed, name, value)
