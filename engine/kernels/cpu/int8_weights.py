"""Weights of linear layers in int8.

Rounding a row to int8 loses most where few values are much larger than the others. Therefore:

- Each input channel of a product is multiplied by a factor, and its weights are divided by it. An error of the input
  costs most where weights are large, one of the weights where the input is: by the factors that make the sum of both
  least, each channel has the geometric mean of its weights' and its input's sizes (SmoothQuant, section 4, with
  exponent 1/2). The sizes of inputs are measured on random hidden states, no calibration text is needed. The weights of
  norms are folded into the products that follow.
- A Hadamard matrix then spreads the input over groups of channels, and the weights have been multiplied by the same
  matrix, which cancels it (QuaRot, section 4).
"""

import ctypes
import math
from collections.abc import Iterable

import torch

from engine.kernels import cdiv
from engine.kernels.cpu.native_build import address
from engine.kernels.decoder_layer import LayerWeights

PANEL = 32
ALIGNED_DEPTH = 64
_COLUMNS_AT_ONCE = 4096
"""Columns that are in float32 at the same time while weights are packed."""
_NUM_STATES, _WINDOW = 64, 8
"""Random hidden states, and how many of them attend to each other."""
_SMALLEST_SHARE = 1 / 16
"""Lower bound of a channel's energy relative to the mean: random states may miss what a channel is for."""


class Int8Weight(ctypes.Structure):
    """`QuadWeights` of cpp/int8/quad_product.h."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("panels", "offsets", "scales", "bias"))


class PackedInt8:
    """The weights of a linear layer in the memory layout that the int8 kernels read.

    Args:
        columns: float32 ``[depth, num_columns]``, as an iterable of contiguous column ranges.
        bias: ``[num_columns]``.
    Attributes:
        num_columns: without padding. Panels are padded to a multiple of 32 columns, whose bias of -inf keeps them from
            being the arg max.
        panels, offsets, scales, bias: int8, int32, float32, and float32 or None, as in cpp/int8/quad_product.h.
    """

    def __init__(self, library: ctypes.CDLL, columns: Iterable[torch.Tensor], bias: torch.Tensor | None) -> None:
        panels, offsets, scales, self.num_columns = [], [], [], 0
        for piece in columns:
            self.depth, num_columns = piece.shape
            self.num_columns += num_columns
            is_whole = num_columns % PANEL == 0
            found = piece if is_whole else torch.nn.functional.pad(piece, (0, -num_columns % PANEL))
            scale = torch.linalg.vector_norm(found, math.inf, dim=0) / 127
            inverse = torch.where(scale > 0, 1 / scale, 0.0)
            num_quads = cdiv(self.depth, ALIGNED_DEPTH) * ALIGNED_DEPTH // 4
            panel = torch.zeros(len(scale) // PANEL, num_quads, PANEL, 4, dtype=torch.int8)
            offset = torch.empty(len(scale), dtype=torch.int32)
            library.round_columns_int8(
                *(found.data_ptr(), inverse.data_ptr(), panel.data_ptr(), offset.data_ptr(), len(scale), self.depth)
            )
            panels.append(panel)
            offsets.append(offset)
            scales.append(scale)
        num_padded = sum(map(len, scales))
        if bias is not None or num_padded > self.num_columns:
            padded = torch.full((num_padded,), -torch.inf, dtype=torch.float32)
            padded[: self.num_columns] = 0 if bias is None else bias
            bias = padded
        self.panels, self.offsets, self.scales = torch.cat(panels), torch.cat(offsets), torch.cat(scales)
        self.bias = bias
        self.structure = Int8Weight(*map(address, (self.panels, self.offsets, self.scales, bias)))

    def columns(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 ``[n]`` -> int8 ``[n, depth]`` and float32 ``[n]``: these columns and their scales."""
        quads = self.panels.view(torch.int32)[..., 0]
        return quads[index // PANEL, :, index % PANEL].view(torch.int8)[:, : self.depth], self.scales[index]


class LayerPacker:
    """Packs the layers of a model, in order: each needs the hidden states that the layers before it produce.

    Args:
        library: the kernels of int8.
        num_q_heads, num_kv_heads, head_dim: of each layer's attention.
    Attributes:
        energy: float64 ``[hidden]``, mean squares of the channels of the residual stream after the last layer, normed
            without a weight.
    """

    energy: torch.Tensor

    def __init__(self, library: ctypes.CDLL, num_q_heads: int, num_kv_heads: int, head_dim: int) -> None:
        self._library = library
        self._head_sizes = num_q_heads, num_kv_heads, head_dim
        self._states: torch.Tensor | None = None

    def pack(self, layer: LayerWeights) -> tuple[tuple[PackedInt8, ...], tuple[torch.Tensor, torch.Tensor]]:
        """The products (query, key and value; output; gate and up, 16 columns of each in turn; down), and the factors
        of the layer's norms, float32 ``[hidden]``."""
        first, second, gated = self._measure_channels(layer)
        halves = [weight.view(-1, 16, weight.shape[1]) for weight in (layer.gate, layer.up)]
        gate_up = torch.stack(halves, dim=1).flatten(0, 2)
        library, (qkv, qkv_bias), (output, output_bias) = self._library, layer.qkv, layer.output
        factors = [
            channel_factors(weight, energy, norm)
            for weight, energy, norm in ((qkv, first, layer.attention_norm), (gate_up, second, layer.mlp_norm))
        ]
        down_factors = channel_factors(layer.down, gated)
        packed = (
            PackedInt8(library, columns_in_pieces(library, qkv, layer.attention_norm / factors[0]), qkv_bias),
            PackedInt8(library, columns_in_pieces(library, output), output_bias),
            PackedInt8(library, columns_in_pieces(library, gate_up, layer.mlp_norm / factors[1]), None),
            PackedInt8(library, columns_in_pieces(library, layer.down, 1 / down_factors), None),
        )
        packed[2].scales.view(-1, 2, 16)[:, 1] *= down_factors.view(-1, 16)  # of up: silu(gate) * up is down's input
        return packed, (factors[0], factors[1])

    def _measure_channels(self, layer: LayerWeights) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mean squares of the input channels of query, key and value, of gate and up, both without the norms' weights,
        and of down; advances the hidden states, each of which attends alike to itself and to those before it in its
        window."""
        num_q_heads, num_kv_heads, head_dim = self._head_sizes
        x = self._states
        if x is None:
            generator = torch.Generator().manual_seed(0)
            shape = _NUM_STATES, len(layer.attention_norm)
            x = torch.randn(shape, generator=generator, dtype=torch.float32).double() * 0.1

        def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return torch.nn.functional.linear(rows, weight.double(), None if bias is None else bias.double())

        def normed(rows: torch.Tensor) -> torch.Tensor:
            return rows * (rows.square().mean(dim=-1, keepdim=True) + layer.epsilon).rsqrt()

        first, bias = normed(x), layer.qkv[1]
        value_rows = slice(-num_kv_heads * head_dim, None)
        values = linear(
            first * layer.attention_norm, layer.qkv[0][value_rows], None if bias is None else bias[value_rows]
        )
        sums = values.view(-1, _WINDOW, num_kv_heads, head_dim).cumsum(dim=1)
        attended = (sums / torch.arange(1, _WINDOW + 1).view(-1, 1, 1)).flatten(0, 1)
        x = x + linear(attended.repeat_interleave(num_q_heads // num_kv_heads, dim=1).flatten(1), *layer.output)
        second = normed(x)
        rows = second * layer.mlp_norm
        gated = torch.nn.functional.silu(linear(rows, layer.gate)) * linear(rows, layer.up)
        self._states = x + linear(gated, layer.down)
        self.energy = normed(self._states).square().mean(dim=0)
        return first.square().mean(dim=0), second.square().mean(dim=0), gated.square().mean(dim=0)


def channel_factors(weight: torch.Tensor, energy: torch.Tensor, norm: torch.Tensor | None = None) -> torch.Tensor:
    """The factors of a product's input channels, float32 ``[depth]``. In float64 and rounded to steps of 2^(1/8), so
    that they do not depend on torch's summation order.

    Args:
        weight: ``[columns, depth]``.
        energy: float64 ``[depth]``, mean square of each input channel, without the weights of `norm` in front of it.
    """
    pieces = torch.split(weight, _COLUMNS_AT_ONCE)
    sizes = torch.stack([piece.double().square().sum(dim=0) for piece in pieces]).sum(dim=0)
    if norm is not None:
        sizes = sizes * norm.double().square()
    ratios = sizes.clamp_min(1e-30) / energy.clamp_min(max(_SMALLEST_SHARE * float(energy.mean()), 1e-30))
    ratios = ratios / ratios.log2().mean().exp2()
    return ((ratios.log2() * 2).round() / 8).exp2().float()


def columns_in_pieces(
    library: ctypes.CDLL, weight: torch.Tensor, factors: torch.Tensor | None = None
) -> Iterable[torch.Tensor]:
    """Weights for inputs that the kernels spread, float32 ``[depth, columns]``, in ranges of columns.

    Args:
        weight: ``[columns, depth]``.
        factors: ``[depth]``, multiplied with the channels; None: none.
    """
    for first in range(0, len(weight), _COLUMNS_AT_ONCE):
        columns = weight[first : first + _COLUMNS_AT_ONCE].T.float()
        columns = columns if factors is None else columns * factors.unsqueeze(1)
        yield spread(library, columns) / spread_group(len(columns))


def spread_group(size: int) -> int:
    """How many neighbours of a row of this size the kernels mix: `by_group` of cpp/int8/spread.h."""
    return min(size & -size, 256)


def spread(library: ctypes.CDLL, x: torch.Tensor) -> torch.Tensor:
    """A Hadamard transform of groups along the first dimension: ``[n, columns]`` to float32 of the same shape. Twice,
    it multiplies by `spread_group`."""
    spread = torch.empty(x.shape, dtype=torch.float32).copy_(x)
    library.spread_columns_int8(spread.data_ptr(), len(x), x[0].numel())
    return spread
