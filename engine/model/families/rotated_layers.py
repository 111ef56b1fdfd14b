"""Layers with different rotations: other angles by kind of layer, no rotation, or of a part of each head."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from engine.kernels.decoder_layer import DecoderLayers
from engine.model.layers import ReplacedLayers


class RotatedLayers(ReplacedLayers):
    """The backend's layers as one module, in place of all decoder layers; computes the angles of every rotation.

    Args:
        layers: the backend's; their ``cos`` and ``sin`` are those of all rotations, concatenated.
        rotations: the argument `layer_type` of `rotary` for each rotation, empty if it takes none; None: no rotation.
    """

    def __init__(
        self, layers: DecoderLayers, rotary: nn.Module, rotations: tuple[str | None, ...], head_dim: int
    ) -> None:
        super().__init__(layers)
        self._rotary = rotary
        self._rotations = rotations
        self._head_dim = head_dim

    def angles(self, hidden_states: torch.Tensor, others: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (len(self._rotations), hidden_states.shape[1], self._head_dim)
        cos, sin = torch.ones(shape, dtype=torch.float32), torch.zeros(shape, dtype=torch.float32)
        for index, kind in enumerate(self._rotations):
            if kind is not None:
                angles = angles_of(self._rotary, kind, hidden_states, others["position_ids"])
                half = angles[0].shape[-1] // 2
                for to, values in zip((cos[index], sin[index]), angles, strict=True):
                    to[:, :half] = values[0, :, :half]
                    to[:, self._head_dim // 2 :][:, :half] = values[0, :, half:]
        return cos.flatten(0, 1), sin.flatten(0, 1)


class DistinctAngles(nn.Module):
    """Wraps a rotary embedding so that its angles are in the usual order: the `distinct` ones, then the same again."""

    def __init__(self, rotary: nn.Module, distinct: slice) -> None:
        super().__init__()
        self._rotary = rotary
        self._distinct = distinct

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = (torch.cat([angles[..., self._distinct]] * 2, dim=-1) for angles in self._rotary(x, positions))
        return cos, sin


def order_of_dims(head_dim: int, num_rotated: int, is_interleaved: bool) -> torch.Tensor | None:
    """The order of a head's dimensions in which d and d + head_dim / 2 are rotated as a pair: int64 ``[head_dim]``, for
    each dimension its index in the model's order. None: the model's order.

    Args:
        num_rotated: how many dimensions are rotated, the first ones.
        is_interleaved: see `Layout`.
    """
    if num_rotated == head_dim and not is_interleaved:
        return None
    first = torch.arange(num_rotated // 2) * (2 if is_interleaved else 1)
    second = first + (1 if is_interleaved else num_rotated // 2)
    left, right = torch.arange(num_rotated, head_dim).chunk(2) if num_rotated < head_dim else (first[:0], first[:0])
    return torch.cat([first, left, second, right])


def angles_of(rotary: Any, kind: str, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, ``[1, T, number of rotated dimensions]`` each.

    Args:
        kind: an entry of `rotations`, see `RotatedLayers`.
        x: has the device and dtype of the result.
        positions: int64 ``[1, T]``.
    """
    found: tuple[torch.Tensor, torch.Tensor] = rotary(x, positions, kind) if kind else rotary(x, positions)
    return found
