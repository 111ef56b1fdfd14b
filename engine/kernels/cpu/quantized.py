"""Linear layers whose weights stay quantized as in their file, 4 to 8 bits with scales; products unpack them.

cpp/quantized/formats.h describes the layout. Products are computed in bfloat16 on CPUs that multiply it, else in
float32. Results are the same bits as with unpacked weights of that format.
"""

import ctypes
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import ModelError
from engine.kernels import cdiv
from engine.kernels.cpu.layer_structures import LinearStructure, PanelLayer
from engine.kernels.cpu.native import NativeBackend
from engine.kernels.cpu.native_build import address
from engine.kernels.cpu.native_layers import PackedLayers, fill_layer
from engine.kernels.decoder_layer import DecoderLayers, LayerWeights

HALF = 16
"""Columns of a half panel, which are stored together."""

_PANEL = 2 * HALF

KINDS = {name: kind for kind, name in enumerate(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"))}
"""Formats by their names in GGUF files: their numbers in cpp/quantized/formats.h."""

PLAIN_KIND = len(KINDS)
"""The format of weights that are not quantized, in the `element_type`."""


def grouped_kind(*, num_bits: int, has_zeros: bool, group: int, dtype: torch.dtype) -> int:
    """The format of safetensors files with one scale for each group of consecutive weights of a column.

    Args:
        num_bits: of a code: 4, or 8 without zero points.
        has_zeros: whether each group has its own zero point; else it is 8 for codes of 4 bits and 0 for 8 bits.
        group: weights of a group, a multiple of 32.
        dtype: of scales, float16 or bfloat16.
    """
    return PLAIN_KIND + 1 + 8 * (num_bits == 8) + 4 * has_zeros + 2 * (group % 128 == 0) + (dtype == torch.bfloat16)


class QuantizedColumns:
    """Output columns of a linear layer in half panels of 16 columns, the last one padded, repacked from a file's rows:
    uint8 ``[half panels, bytes]``.

    Args:
        library: the functions of quantized.cpp.
        kind: the number of their format.
        depth: weights of a column.
    """

    def __init__(self, library: ctypes.CDLL, kind: int, *, depth: int, num_columns: int) -> None:
        self.library, self._kind, self.depth, self.num_columns = library, kind, depth, num_columns
        half_bytes = library.half_bytes_quantized(kind, depth)
        self.panels = torch.empty(cdiv(num_columns, HALF), half_bytes, dtype=torch.uint8)

    def fill(self, first_panel: int, rows: npt.NDArray[np.int64], tensor: npt.NDArray[np.uint8]) -> None:
        """Repacks n half panels from a GGUF tensor.

        Args:
            first_panel: index of the first half panel to write.
            rows: ``[16 n]``, the file's row of each column, -1 for a column of zeros.
            tensor: ``[rows, bytes]`` as in the file.
        """
        assert tensor.flags.c_contiguous
        assert rows.flags.c_contiguous
        self.library.repack_quantized(
            *(self._kind, tensor.ctypes.data, tensor.shape[1], rows.ctypes.data),
            *(self.panels[first_panel].data_ptr(), self.panels.shape[1], len(rows) // HALF, self.depth),
        )

    def fill_codes(
        self, first_panel: int, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None
    ) -> None:
        """Packs n half panels of a `grouped_kind`.

        Args:
            first_panel: index of the first half panel to write.
            codes: uint8 or int8 ``[16 n, depth]``.
            scales, zeros: ``[16 n, groups]``, in the format's dtype, and uint8.
        """
        given = [None if each is None else each.contiguous() for each in (codes, scales, zeros)]
        self.library.repack_codes_quantized(
            *(self._kind, *map(address, given), self.depth // scales.shape[1]),
            *(self.panels[first_panel].data_ptr(), self.panels.shape[1], len(codes) // HALF, self.depth),
        )

    def addresses(self) -> npt.NDArray[np.int64]:
        """``[half panels, 2]``: `HalfPanel` of cpp/quantized/formats.h."""
        first, step = self.panels.data_ptr(), self.panels.shape[1]
        found = np.empty((len(self.panels), 2), dtype=np.int64)
        found[:, 0], found[:, 1] = first + step * np.arange(len(self.panels)), self._kind
        return found


class QuantizedWeight:
    """The weights of a linear layer (see `PackedWeight`), in one format or several. Raises `ModelError` if a number of
    columns is not supported.

    Args:
        parts: consecutive ranges of columns; all but the last have a multiple of 16 columns.
        bias: ``[columns]``.
        is_gated: whether one half of the parts is the gate, the other up; they are interleaved by 16 columns.
    """

    def __init__(
        self, parts: Sequence[QuantizedColumns], bias: torch.Tensor | None = None, *, is_gated: bool = False
    ) -> None:
        self.parts, self.depth, self.is_gated = parts, parts[0].depth, is_gated
        self._library = parts[0].library
        self._dtype = element_type(self._library)
        self.num_columns = sum(part.num_columns for part in parts)
        if any(part.num_columns % HALF for part in parts[:-1]) or self.depth % _PANEL:
            sizes = " and ".join(str(part.num_columns) for part in parts)
            raise ModelError(f"dtype 'quantized' takes columns in multiples of 16 and rows of 32, got {sizes}")
        joined = np.concatenate([part.addresses() for part in parts])
        if is_gated:
            joined = np.stack(np.split(joined, 2), axis=1).reshape(-1, 2)
        if len(joined) % 2:  # kernels compute whole panels: two halves
            joined = np.concatenate([joined, joined[-1:]])
        self.halves = joined
        self.num_padded = len(joined) * HALF
        if self.num_padded > self.num_columns:
            padded = torch.full((self.num_padded,), -torch.inf, dtype=self._dtype)
            padded[: self.num_columns] = 0 if bias is None else bias
            bias = padded
        self.bias = None if bias is None else bias.to(self._dtype)
        self.structure = LinearStructure(self.halves.ctypes.data, address(self.bias))

    @property
    def num_bytes(self) -> int:
        return sum(part.panels.nbytes for part in self.parts)

    def kernel(self, name: str) -> Callable[..., None]:
        found: Callable[..., None] = getattr(self._library, f"{name}_quantized")
        return found

    def columns(self, index: torch.Tensor) -> torch.Tensor:
        """See `PackedWeight.columns`."""
        index, out = index.contiguous(), torch.empty(len(index), self.depth, dtype=self._dtype)
        self._library.columns_quantized(self.halves.ctypes.data, index.data_ptr(), out.data_ptr(), *out.shape)
        return out


QuantizedLayer = tuple[LayerWeights, Sequence[QuantizedWeight]]
"""A layer, of whose weights only the norms are read, and its products: qkv, output, gate and up, down."""


def element_type(library: ctypes.CDLL) -> torch.dtype:
    """What the kernels of quantized.cpp compute in: bfloat16 if this CPU multiplies it, else float32."""
    return torch.bfloat16 if library.element_bytes_quantized() == 2 else torch.float32


def make_quantized_layers(kernels: NativeBackend, layers: Iterable[QuantizedLayer]) -> DecoderLayers:
    """Layers in one C++ call, for kernels of the `element_type`. Raises `ModelError` if a size is not supported."""
    packed = []
    for weights, products in layers:
        for product in products:
            if (columns := product.num_columns) < product.num_padded:
                raise ModelError(f"dtype 'quantized' takes layers in multiples of 32, got {columns} columns")
        packed.append(fill_layer(PanelLayer, kernels, weights, products))
    return PackedLayers(kernels, products[0].kernel("compute_layers"), packed)
