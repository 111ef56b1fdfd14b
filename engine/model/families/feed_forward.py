"""Reads the feed-forward of a transformers layer, dense or with experts, into the fields of `BranchedWeights`."""

from typing import Any

import torch

from engine.kernels.branched_layer import Experts

_GATES = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "GELUActivation": "gelu",
}
PRODUCTS = (("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj"), ("c_fc", "c_proj"), ("fc1", "fc2"))
_DENSE = {f"{name}.{kind}" for names in PRODUCTS for name in names for kind in ("weight", "bias")}
_OF_EXPERTS = {
    *(f"experts.{name}_proj{kind}" for name in ("gate_up", "down") for kind in ("", "_bias")),
    *(f"{name}.{kind}" for name in ("gate", "router") for kind in ("weight", "bias")),
    *(f"shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")),
    "shared_expert_gate.weight",
}
PARAMETERS = frozenset(_DENSE | _OF_EXPERTS)
"""The parameters that `read_feed_forward` reads."""


def is_covered(mlp: Any) -> bool:
    """Whether `read_feed_forward` supports the module."""
    if not hasattr(mlp, "experts"):
        return _function_of(mlp) in _GATES
    shared = getattr(mlp, "shared_expert", None)
    size = mlp.experts.down_proj.shape[1 if mlp.experts.is_transposed else 2]
    if shared is not None and (
        shared.gate_proj.out_features % size or _function_of(shared) != _function_of(mlp.experts)
    ):
        return False
    return hasattr(mlp.experts, "alpha") or _function_of(mlp.experts) in _GATES


def read_feed_forward(mlp: Any, *, among_experts: bool) -> dict[str, Any]:
    """The feed-forward's fields of `BranchedWeights`, for a module for which `is_covered` is true. Where other layers
    have experts (`among_experts`), a dense layer becomes one shared expert."""
    if hasattr(mlp, "experts"):
        return _read_experts(mlp)
    first, *second = next(names for names in PRODUCTS if hasattr(mlp, names[0]))
    linears = [getattr(mlp, name) for name in (first, *second)]
    if first == "gate_up_proj":
        gate, up = linears[0].weight.chunk(2)
        gate_bias, up_bias = (None, None) if linears[0].bias is None else linears[0].bias.chunk(2)
    else:
        gate, gate_bias = linears[0].weight, linears[0].bias
        up, up_bias = (linears[1].weight, linears[1].bias) if len(linears) == 3 else (gate[:0], None)
    down = linears[-1]
    fields = {"gate": gate, "up": up, "down": down.weight, "gate_function": _GATES[_function_of(mlp)]}
    if among_experts:
        fields["experts"] = Experts(router=gate[:0], num_experts=0, num_chosen=0, num_shared=1)
    return fields | {"gate_bias": gate_bias, "up_bias": up_bias, "down_bias": down.bias}


def _read_experts(mlp: Any) -> dict[str, Any]:
    experts, router = mlp.experts, getattr(mlp, "gate", None) or mlp.router
    gate_up, down = experts.gate_up_proj, experts.down_proj
    if experts.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    gate, up = _halves(experts, gate_up)
    router_weight, num_shared = router.weight, 0
    if (shared := getattr(mlp, "shared_expert", None)) is not None:
        # A shared expert of n times the intermediate size becomes n shared experts.
        size = down.shape[2]
        num_shared = shared.gate_proj.out_features // size
        gate = torch.cat([gate, shared.gate_proj.weight.unflatten(0, (-1, size))])
        up = torch.cat([up, shared.up_proj.weight.unflatten(0, (-1, size))])
        down = torch.cat([down, shared.down_proj.weight.unflatten(1, (-1, size)).transpose(0, 1)])
        router_weight = torch.cat([router_weight, mlp.shared_expert_gate.weight])
    fields = {"gate": gate.flatten(0, 1), "up": up.flatten(0, 1), "down": down.flatten(0, 1)}
    if experts.has_bias:
        gate_bias, up_bias = _halves(experts, experts.gate_up_proj_bias)
        fields |= {"gate_bias": gate_bias.flatten(), "up_bias": up_bias.flatten()}
        fields |= {"down_bias": experts.down_proj_bias.flatten()}
    choice = Experts(
        router=router_weight,
        router_bias=getattr(router, "bias", None),
        num_experts=int(experts.num_experts),
        num_chosen=int(router.top_k),
        num_shared=num_shared,
        is_renormalised=bool(getattr(router, "norm_topk_prob", True)),
    )
    if hasattr(experts, "alpha"):
        gating = {"gate_function": "clamped", "gate_alpha": float(experts.alpha), "gate_limit": float(experts.limit)}
    else:
        gating = {"gate_function": _GATES[_function_of(experts)]}
    return fields | gating | {"experts": choice}


def _halves(experts: Any, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits ``[experts, 2 * intermediate, ...]`` into gate and up."""
    if experts.is_concatenated:
        gate, up = gate_up.chunk(2, dim=1)
        return gate, up
    return gate_up[:, ::2], gate_up[:, 1::2]


def _function_of(mlp: Any) -> str:
    """The class name of the activation function."""
    functions = (getattr(mlp, name, None) for name in ("act_fn", "activation_fn", "act"))
    return type(next((function for function in functions if function is not None), None)).__name__
