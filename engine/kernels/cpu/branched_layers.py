"""Packs the layers of `engine.kernels.branched_layer` for the C++ kernels."""

import ctypes
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from engine.kernels import cdiv
from engine.kernels.branched_layer import BranchedWeights
from engine.kernels.cpu.native_build import address
from engine.kernels.decoder_layer import DECODER_LAYER, LayerWeights

if TYPE_CHECKING:
    from engine.kernels.cpu.layer_structures import PackedLayer
    from engine.kernels.cpu.native import NativeBackend
    from engine.kernels.cpu.native_layers import PackedWeight

_NUMBERED = (
    *DECODER_LAYER,
    *("attention_input", "norm_heads", "output_branch", "add_attention", "mlp_input", "activate"),
    *("down_branch", "add_mlp", "select_normed_rows", "route", "experts"),
)
"""Operations in the order of their numbers in cpp/layer.h."""

_ACTIVATIONS = ("none", "silu", "gelu_tanh", "gelu", "clamped")
"""In the order of their numbers in cpp/activation.h."""

_TENSORS = (
    *("post_attention_norm", "post_mlp_norm", "apart_q_norm", "apart_k_norm", "attention_norm_bias", "mlp_norm_bias"),
    *("router", "router_bias"),
)


class _Branches(ctypes.Structure):
    """`Branches` of cpp/branches.h."""

    _fields_ = (
        *zip(_TENSORS, repeat(ctypes.c_void_p)),
        *zip(("has_wide_norms", "is_centered"), repeat(ctypes.c_int32)),
        *zip(("norm_offset", "multiplier"), repeat(ctypes.c_float)),
        *zip(("activation", "is_gated"), repeat(ctypes.c_int32)),
        *zip(("gate_alpha", "gate_limit"), repeat(ctypes.c_float)),
        *zip(("num_experts", "num_chosen", "num_shared"), repeat(ctypes.c_int32)),
        *zip(("router_columns", "is_renormalised", "has_shared_gate"), repeat(ctypes.c_int32)),
    )


def pack_gate_up(kernels: "NativeBackend", layer: LayerWeights) -> "PackedWeight | None":
    """The feed-forward's first product; the experts' columns are concatenated. None as for `pack`."""
    assert isinstance(layer, BranchedWeights), "plain layers are packed by native_layers"
    if not layer.is_gated:
        return kernels.pack(layer.gate, layer.gate_bias)
    packed = kernels.pack_gated(layer.gate, layer.up)
    if packed is None or layer.gate_bias is None or layer.up_bias is None:
        return packed
    biases = torch.stack([layer.gate_bias.view(-1, 16), layer.up_bias.view(-1, 16)], dim=1)
    return replace(packed, bias=biases.flatten())


def complete(packed: "PackedLayer", layer: LayerWeights, kernels: "NativeBackend") -> None:
    """Fills in what only branched layers have; `kernels` pack the router. See `BranchedWeights`."""
    assert isinstance(layer, BranchedWeights), "plain layers need none of it"
    tensors = {name: getattr(layer, name, None) for name in _TENSORS}
    sinks = None if layer.scoring.sinks is None else layer.scoring.sinks.float().contiguous()
    settings = {
        name: getattr(layer, name)
        for name in (
            *("has_wide_norms", "is_centered", "norm_offset", "multiplier", "is_gated"),
            *("gate_alpha", "gate_limit"),
        )
    }
    columns = (0, 0, packed.hidden_size, 0, 0)
    experts = layer.experts
    if experts is not None:
        num_slots = experts.num_chosen + experts.num_shared
        columns = (*columns[:3], (num_slots + 1) * packed.hidden_size, (num_slots + 1) * packed.intermediate_size)
        names = ("num_experts", "num_chosen", "num_shared", "is_renormalised", "has_shared_gate")
        settings |= {name: getattr(experts, name) for name in names}
        if num_rows := len(experts.router):
            router = kernels.pack(pad(experts.router, (0, 0, 0, cdiv(num_rows, 32) * 32 - num_rows)))
            assert router is not None, "the other products of this depth have been packed"
            settings["router_columns"] = router.num_columns
            tensors["router"] = router.panels
        tensors["router_bias"] = None if experts.router_bias is None else experts.router_bias.float()
    branches = _Branches(
        **{name: address(tensor) for name, tensor in tensors.items()},
        activation=_ACTIVATIONS.index(layer.gate_function),
        **settings,
    )
    packed.branches = ctypes.addressof(branches)
    packed.scoring.sinks = address(sinks)
    packed.rotation = layer.rotation
    packed.down.bias = address(layer.down_bias)
    packed.kept = (*packed.kept, branches, *tensors.values(), layer.down_bias, sinks)
    packed.operations = [_NUMBERED.index(name) for name in layer.operations]
    packed.num_branch_columns = columns
