"""Linear layers of an encoder on a CPU: weights in oneDNN's packed layout, gelu fused with the product."""

import torch
from torch import nn
from torch.nn import functional

TYPICAL_ROWS = 2048
"""Number of rows for which oneDNN chooses the layout of the weights."""


class PackedLinear(nn.Module):
    """A linear layer with a copy of the weights of `linear`, optionally followed by an exact gelu."""

    def __init__(self, linear: nn.Linear, *, has_gelu: bool = False) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), TYPICAL_ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._activation = ("gelu", "none") if has_gelu else ("none", "")

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """``[..., inputs]`` -> ``[..., outputs]``."""
        name, algorithm = self._activation
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(states, self._weight, self._bias, name, [], algorithm)
        return result


def pack_linears(module: nn.Module) -> None:
    """Replaces the linear layers below a module, and fuses each `intermediate_act_fn` that is gelu with its `dense`.

    Does nothing for weights in a format or on a device that oneDNN does not support.
    """
    weights = [layer.weight for layer in module.modules() if isinstance(layer, nn.Linear)]
    is_covered = all(
        weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16) for weight in weights
    )
    if not (is_covered and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return
    with torch.inference_mode():
        _pack(module)


def _pack(module: nn.Module) -> None:
    activation = getattr(module, "intermediate_act_fn", None)  # of BERT and similar encoders
    has_gelu = isinstance(getattr(module, "dense", None), nn.Linear) and _is_exact_gelu(activation)
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, PackedLinear(child, has_gelu=has_gelu and name == "dense"))
        else:
            _pack(child)
    if has_gelu:
        module.intermediate_act_fn = nn.Identity()


def _is_exact_gelu(activation: object) -> bool:
    """Whether an activation computes gelu by the error function, as transformers' "gelu" does."""
    probe = torch.linspace(-3.0, 3.0, 13)
    return callable(activation) and torch.equal(activation(probe), functional.gelu(probe))
