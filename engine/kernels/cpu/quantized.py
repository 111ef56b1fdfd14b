"""Linear layers whose weights stay quantized as in their file, 4 to 8 bits with scales; products unpack them.

cpp/quantized/formats.h describes the layout. Products are computed in bfloat16 on CPUs that multiply it, else in
float32. Results are the same bits as with unpacked weights of that format.
"""

import ctypes
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import ModelError
from engine.kernels import cdiv
from engine.kernels.cpu.branched_layers import complete
from engine.kernels.cpu.layer_structures import PanelLayer
from engine.kernels.cpu.native import NativeBackend
from engine.kernels.cpu.native_build import address
from engine.kernels.cpu.native_layers import PackedLayers
from engine.kernels.cpu.quantized_formats import HALF, QuantizedFormat
from engine.kernels.decoder_layer import DecoderLayers, LayerWeights

_PANEL = 2 * HALF


class QuantizedColumns:
    """Output columns of a linear layer in half panels of 16 columns, the last one padded, repacked from a file's rows:
    uint8 ``[half panels, bytes]``. `depth` is the number of weights of a column."""

    def __init__(self, layout: QuantizedFormat, *, depth: int, num_columns: int) -> None:
        self.format, self.depth, self.num_columns = layout, depth, num_columns
        panel_bytes = depth // self.format.block_depth * self.format.packed_bytes
        self.panels = torch.empty(cdiv(num_columns, HALF), panel_bytes, dtype=torch.uint8)

    def fill(
        self, library: ctypes.CDLL, first_panel: int, rows: npt.NDArray[np.int64], tensor: npt.NDArray[np.uint8]
    ) -> None:
        """Repacks n half panels from a GGUF tensor.

        Args:
            first_panel: index of the first half panel to write.
            rows: ``[16 n]``, the file's row of each column, -1 for a column of zeros.
            tensor: ``[rows, bytes]`` as in the file.
        """
        assert tensor.flags.c_contiguous
        assert rows.flags.c_contiguous
        library.repack_quantized(
            *(self.format.kind, tensor.ctypes.data, tensor.shape[1], rows.ctypes.data),
            *(self.panels[first_panel].data_ptr(), self.panels.shape[1], len(rows) // HALF, self.depth),
        )

    def fill_codes(
        self,
        library: ctypes.CDLL,
        first_panel: int,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
    ) -> None:
        """Packs n half panels of a `grouped_format`.

        Args:
            first_panel: index of the first half panel to write.
            codes: uint8 or int8 ``[16 n, depth]``.
            scales, zeros: ``[16 n, groups]``, in the format's dtype, and uint8.
        """
        kept = [given.contiguous() for given in (codes, scales, *(() if zeros is None else (zeros,)))]
        addresses = [given.data_ptr() for given in kept]
        library.repack_codes_quantized(
            *(self.format.kind, *addresses, *(() if zeros is not None else (None,)), self.depth // scales.shape[1]),
            *(self.panels[first_panel].data_ptr(), self.panels.shape[1], len(codes) // HALF, self.depth),
        )

    def addresses(self) -> npt.NDArray[np.int64]:
        """``[half panels, 2]``: `HalfPanel` of cpp/quantized/formats.h."""
        first, step = self.panels.data_ptr(), self.panels.shape[1]
        found = np.empty((len(self.panels), 2), dtype=np.int64)
        found[:, 0], found[:, 1] = first + step * np.arange(len(self.panels)), self.format.kind
        return found


class QuantizedWeight:
    """The weights of a linear layer, in one format or several. Raises `ModelError` if a number of columns is not
    supported.

    Args:
        parts: consecutive ranges of columns; all but the last have a multiple of 16 columns.
        dtype: that products compute in: see `element_type`.
        bias: ``[columns]``.
        is_gated: whether one half of the parts is the gate, the other up; they are interleaved by 16 columns.
    """

    def __init__(
        self,
        parts: Sequence[QuantizedColumns],
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        *,
        is_gated: bool = False,
    ) -> None:
        self.parts, self.depth = parts, parts[0].depth
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
            padded = torch.full((self.num_padded,), -torch.inf, dtype=dtype)
            padded[: self.num_columns] = 0 if bias is None else bias
            bias = padded
        self.bias = None if bias is None else bias.to(dtype)

    @property
    def num_bytes(self) -> int:
        return sum(part.panels.nbytes for part in self.parts)

    def addresses(self) -> tuple[int, int | None]:
        return self.halves.ctypes.data, address(self.bias)


QuantizedLayer = tuple[LayerWeights, Sequence[QuantizedWeight]]
"""A layer, of whose weights only the norms are read, and its products: qkv, output, gate and up, down."""


def element_type(library: ctypes.CDLL) -> torch.dtype:
    """What the kernels of quantized.cpp compute in: bfloat16 if this CPU multiplies it, else float32."""
    return torch.bfloat16 if library.element_bytes_quantized() == 2 else torch.float32


def make_quantized_layers(
    kernels: NativeBackend, library: ctypes.CDLL, layers: Iterable[QuantizedLayer]
) -> DecoderLayers:
    """Layers in one C++ call; `ModelError` if a size is not supported.

    Args:
        kernels: of the layers' attention shape, for the library's `element_type`.
        library: the functions of quantized.cpp.
    """
    packed = [_pack(kernels, layer) for layer in layers]
    return PackedLayers(kernels, library.compute_layers_quantized, packed, dtype=kernels.dtype)


def _pack(kernels: NativeBackend, layer: QuantizedLayer) -> PanelLayer:
    weights, products = layer
    for product in products:
        if product.num_padded > product.num_columns:
            raise ModelError(f"dtype 'quantized' takes layers in multiples of 32, got {product.num_columns} columns")
    norms = weights.attention_norm, weights.q_norm, weights.k_norm, weights.mlp_norm
    addresses = (*map(address, norms), *chain.from_iterable(product.addresses() for product in products))
    packed = PanelLayer(
        *(*addresses, products[0].depth, products[-1].depth),
        *(kernels.num_q_heads, kernels.num_kv_heads, kernels.head_dim, kernels.block_size),
        *(weights.scoring.window, weights.epsilon, weights.scoring.scale),
    )
    packed.kept = (*norms, *products)
    if type(weights) is not LayerWeights:
        complete(packed, weights, kernels)
    return packed


class QuantizedOutputLayer:
    """An output layer (see `AttentionBackend.make_output_layer`) or an embedding table with quantized weights."""

    def __init__(self, kernels: NativeBackend, library: ctypes.CDLL, weight: QuantizedWeight) -> None:
        self._kernels = kernels
        self._library = library
        self._weight = weight

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = self._kernels.copy_rows(hidden)
        out = torch.empty(cdiv(len(rows), _PANEL) * _PANEL, self._weight.num_padded, dtype=rows.dtype)
        self._library.project_quantized(
            *(rows.data_ptr(), *self._weight.addresses(), out.data_ptr()),
            *(len(rows), self._weight.num_padded, self._weight.depth),
        )
        return out[: len(rows), : self._weight.num_columns]

    def most_likely(self, hidden: torch.Tensor, allowed: torch.Tensor | None = None) -> torch.Tensor:
        """Does not store the logits."""
        rows, out = self._kernels.copy_rows(hidden), torch.empty(len(hidden), dtype=torch.int64)
        num_columns = self._weight.num_padded
        assert allowed is None or (allowed.shape == (len(rows), num_columns // 32) and allowed.is_contiguous())
        self._library.largest_column_quantized(
            *(rows.data_ptr(), *self._weight.addresses(), address(allowed)),
            *(out.data_ptr(), len(rows), num_columns, self._weight.depth),
        )
        return out

    def label_logits(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        bias = None if self._weight.bias is None else self._weight.bias[token_ids]
        return self._kernels.label_columns(hidden, self.weights_of(token_ids), bias)

    def weights_of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]``."""
        ids = token_ids.flatten()
        out = torch.empty(len(ids), self._weight.depth, dtype=self._kernels.dtype)
        self._library.columns_quantized(*(self._weight.addresses()[0], ids.data_ptr(), out.data_ptr(), *out.shape))
        return out.view(*token_ids.shape, -1)
