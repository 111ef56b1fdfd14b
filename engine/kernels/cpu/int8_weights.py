"""Weights of linear layers in int8.

Rounding a row to int8 loses most where few values are much larger than the others. The input of a product is therefore
multiplied by a Hadamard matrix, which spreads outliers, and the weights by the same matrix, which cancels it (QuaRot,
section 4). The weights of norms are folded into the products that follow.

The error of a product is the weights' rounding errors times the input, and some input channels are much larger than
others. The rounding error of a weight is therefore compensated by weights of the same column that are rounded later, so
that large channels meet small errors (GPTQ, section 3; the channels' covariance is diagonal before the Hadamard
transform, so its inverse is known). Channel sizes are measured on random hidden states, no calibration text is needed.
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
_FEEDBACK = 64
"""Largest block of weights that compensate each other's errors: MAX_FEEDBACK of cpp/int8/quad_rounding.h."""
_COLUMNS_AT_ONCE = 4096
"""Columns that are in float32 at the same time while weights are packed."""
_NUM_STATES = 32
_SMALLEST_SHARE = 1 / 64
"""Lower bound of a channel's energy relative to the mean: else errors would pile up in channels close to zero."""


class Int8Weight(ctypes.Structure):
    """`QuadWeights` of cpp/int8/quad_product.h."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("panels", "offsets", "scales", "bias"))


class PackedInt8:
    """The weights of a linear layer in the memory layout that the int8 kernels read.

    Args:
        columns: float32 ``[depth, num_columns]``, as an iterable of contiguous column ranges.
        bias: ``[num_columns]``.
        feedback: float32 ``[depth / size, size, size]``: which share of the error of a weight (last dim) is added to
            each later weight of its block; None: every weight is rounded to nearest.
    Attributes:
        num_columns: without padding. Panels are padded to a multiple of 32 columns, whose bias of -inf keeps them from
            being the arg max.
        panels, offsets, scales, bias: int8, int32, float32, and float32 or None, as in cpp/int8/quad_product.h.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        columns: Iterable[torch.Tensor],
        bias: torch.Tensor | None,
        feedback: torch.Tensor | None = None,
    ) -> None:
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
                *(found.data_ptr(), inverse.data_ptr(), address(feedback)),
                *(panel.data_ptr(), offset.data_ptr(), len(scale), self.depth),
                4 if feedback is None else feedback.shape[1],
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
    """

    def __init__(self, library: ctypes.CDLL, num_q_heads: int, num_kv_heads: int, head_dim: int) -> None:
        self._library = library
        self._head_sizes = num_q_heads, num_kv_heads, head_dim
        self._states: torch.Tensor | None = None

    def pack(self, layer: LayerWeights) -> tuple[PackedInt8, ...]:
        """Query, key and value; output; gate and up, 16 columns of each in turn; down."""
        energies = self._measure_channels(layer)
        halves = [weight.view(-1, 16, weight.shape[1]) for weight in (layer.gate, layer.up)]
        gate_up = torch.stack(halves, dim=1).flatten(0, 2)
        return (
            self._pack_input(layer.qkv[0], layer.attention_norm, layer.qkv[1], energies[0]),
            self._pack_output(*layer.output, energies[1]),
            self._pack_input(gate_up, layer.mlp_norm, None, energies[2]),
            self._pack_output(layer.down, None, energies[3]),
        )

    def _measure_channels(self, layer: LayerWeights) -> list[torch.Tensor]:
        """Mean squares of the input channels of each product, without the norms' weights; advances the hidden states,
        each of which attends only to itself. Computed in float64 and rounded to powers of two, so that the weights do
        not depend on torch's summation order."""
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

        first = normed(x)
        bias = layer.qkv[1]
        value_rows = slice(-num_kv_heads * head_dim, None)
        values = linear(
            first * layer.attention_norm, layer.qkv[0][value_rows], None if bias is None else bias[value_rows]
        )
        heads = values.view(-1, num_kv_heads, head_dim).repeat_interleave(num_q_heads // num_kv_heads, dim=1)
        attended = heads.flatten(1)
        x = x + linear(attended, *layer.output)
        second = normed(x)
        rows = second * layer.mlp_norm
        gated = torch.nn.functional.silu(linear(rows, layer.gate)) * linear(rows, layer.up)
        self._states = x + linear(gated, layer.down)
        found = []
        for inputs in (first, attended, second, gated):
            energy = inputs.square().mean(dim=0)
            energy = (energy / energy.mean().clamp_min(1e-30)).clamp_min(_SMALLEST_SHARE)
            found.append(energy.log2().round().exp2())
        return found

    def _pack_input(
        self, weight: torch.Tensor, norm: torch.Tensor, bias: torch.Tensor | None, energy: torch.Tensor
    ) -> PackedInt8:
        """A product that reads the normed residual stream, ``[columns, hidden]``; the norm's weight is folded in."""
        pieces = columns_in_pieces(self._library, weight, norm.float())
        feedback = error_feedback(self._library, energy, len(energy))
        return PackedInt8(self._library, pieces, bias, feedback)

    def _pack_output(self, weight: torch.Tensor, bias: torch.Tensor | None, energy: torch.Tensor) -> PackedInt8:
        """A product that is added to the residual stream, ``[hidden, depth]``; the kernel spreads its input."""
        group = min(256, spread_group(len(energy)))
        library = self._library
        columns = spread(library, spread(library, weight).T, group) / math.sqrt(group)
        bias = None if bias is None else spread(library, bias)
        return PackedInt8(library, [columns], bias, error_feedback(library, energy, group))


def columns_in_pieces(
    library: ctypes.CDLL, weight: torch.Tensor, factors: torch.Tensor | None = None
) -> Iterable[torch.Tensor]:
    """Weights after `spread`, float32 ``[depth, columns]``, in ranges of columns.

    Args:
        weight: ``[columns, depth]``.
        factors: ``[depth]``, multiplied with the channels before they are spread; None: none.
    """
    for first in range(0, len(weight), _COLUMNS_AT_ONCE):
        columns = weight[first : first + _COLUMNS_AT_ONCE].T
        yield spread(library, columns if factors is None else columns.float() * factors.unsqueeze(1))


def spread_group(size: int) -> int:
    """The largest power of two that divides `size`."""
    return size & -size


def spread(library: ctypes.CDLL, x: torch.Tensor, group: int | None = None) -> torch.Tensor:
    """An orthogonal transform along the first dimension that is its own inverse: ``[n, ...]`` to float32 of the same
    shape. Hadamard matrices of `spread_group` of `group`, mixed by a discrete Hartley transform (cpp/int8).

    Args:
        group: how many neighbours are mixed; None: all.
    """
    spread = torch.empty(x.shape, dtype=torch.float32).copy_(x)
    library.spread_columns_int8(spread.data_ptr(), len(x), x[0].numel(), group or len(x))
    return spread


def error_feedback(library: ctypes.CDLL, energy: torch.Tensor, group: int) -> torch.Tensor:
    """The `feedback` of `PackedInt8` for a product whose input channels are spread in groups.

    Args:
        energy: float64 ``[depth]``, mean square of each channel.
        group: how many channels `spread` mixes.
    """
    power = spread_group(group)
    mixing = spread(library, torch.eye(group // power, dtype=torch.float32)).double().square()
    energy = mixing @ energy.view(-1, group // power, power)
    size = min(power, _FEEDBACK)
    # A Hadamard matrix of a larger group consists of such blocks; each sees the mean energy of the group's channels.
    energy = energy.view(-1, power // size, size)
    energy = energy.mean(dim=1, keepdim=True).expand(energy.shape).reshape(-1, size)
    hadamard = spread(library, torch.eye(size, dtype=torch.float32)).double()
    lower = torch.linalg.cholesky(hadamard @ (hadamard / energy.unsqueeze(1)).mT)
    factors = -torch.tril(lower / lower.diagonal(dim1=1, dim2=2).unsqueeze(1), diagonal=-1)
    # Rounded so that the weights do not depend on the summation order of the decomposition.
    return ((factors * 1024).round() / 1024).float().contiguous()
