"""The attention backend on the C++ kernels of cpp/, for bfloat16 and float32.

Without a C++ compiler `engine.kernels.cpu.torch_attention` is used instead.
"""

import ctypes
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from engine.kernels.attention_backend import AttentionBackend
from engine.kernels.cpu.layer_structures import ELEMENT_TYPES, PanelLayer
from engine.kernels.cpu.native_build import address, load_library
from engine.kernels.cpu.native_layers import LinearWeight, PackedLayers, PackedOutputLayer, PackedWeight, pack_layer
from engine.kernels.cpu.native_operations import NativeOperations
from engine.kernels.decoder_layer import DecoderLayers, LayerWeights
from engine.kernels.output_layer import columns_in_float64


class NativeBackend(NativeOperations, AttentionBackend):
    """The kernels for one element type and one attention shape.

    Args:
        dtype: of all tensors, bfloat16 or float32.
        folder: where compiled kernels are stored.
        shape: see `AttentionShape`.
    Raises:
        ValueError: the shape or the element type is not supported.
        NativeBuildError: there is no compiler, or it fails.
    """

    name = "native"
    label_columns = staticmethod(columns_in_float64)

    def __init__(self, *, dtype: torch.dtype, folder: Path, **shape: int) -> None:
        if dtype not in ELEMENT_TYPES:
            raise ValueError(f"element type {dtype} is not one of {', '.join(map(str, ELEMENT_TYPES))}")
        super().__init__(**shape)
        self.library, self.suffix, self.dtype = load_library(folder, "native"), ELEMENT_TYPES[dtype], dtype

    def make_layers(self, weights: Iterable[LayerWeights]) -> DecoderLayers | None:
        """Layers in one C++ call; None where the kernels do not support the sizes. `weights` is read one at a time, so
        that the caller can free each layer before the next one is copied."""
        packed: list[PanelLayer] = []
        for layer in weights:
            if (found := pack_layer(self, layer)) is None:
                assert not packed, "layers of one model differ in shape"
                return None
            packed.append(found)
        return PackedLayers(self, self.kernel("compute_layers"), packed)

    def make_output_layer(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedOutputLayer | None:
        """The output layer with packed weights; None as for `pack`."""
        packed = self.pack(weight, bias)
        return None if packed is None else PackedOutputLayer(self, packed)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedWeight | None:
        """Packs ``[n, depth]`` weights for `project`; None where the kernels do not support the size."""
        num_columns, depth = weight.shape
        if num_columns % 32 or depth % 32:
            return None
        # [columns stored together, word along the depth, column, element]: a word of 4 bytes holds a pair of bf16.
        size, together = 4 // weight.itemsize, self.kernel("columns_together")()
        panels = weight.view(num_columns // together, together, depth // size, size).permute(0, 2, 1, 3).contiguous()
        return PackedWeight(kernel=self.kernel, panels=panels, bias=bias, num_columns=num_columns, depth=depth)

    def pack_gated(self, gate: torch.Tensor, up: torch.Tensor) -> PackedWeight | None:
        """Packs two ``[n, depth]`` weights so that `project` computes silu(gate) * up; None as for `pack`."""
        if gate.shape[0] % 16:
            return None
        halves = torch.stack([gate.view(-1, 16, gate.shape[1]), up.view(-1, 16, up.shape[1])], dim=1)
        packed = self.pack(halves.view(-1, gate.shape[1]))
        return None if packed is None else replace(packed, is_gated=True)

    def copy_rows(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of ``[T, n]`` in memory as `project` needs it."""
        return self.new_rows(*x.shape).copy_(x)

    def project(self, x: torch.Tensor, weight: LinearWeight, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The linear layer, plus `residual` if given: ``[T, depth]`` -> ``[T, padded columns]``.

        Args:
            x: output of a kernel or of `copy_rows`; its memory reaches to a multiple of 32 rows.
        """
        out = self.new_rows(len(x), weight.num_padded // 2 if weight.is_gated else weight.num_padded)
        weight.kernel("project")(
            *(x.data_ptr(), ctypes.byref(weight.structure), address(residual), out.data_ptr()),
            *(len(x), weight.num_padded, weight.depth, weight.is_gated),
        )
        return out

    def largest_column(
        self, x: torch.Tensor, weight: LinearWeight, allowed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The arg max over the linear layer's output columns, the lowest on ties: int64 ``[T]``.

        Outputs are compared in float32 and not stored. A panel of 32 columns is skipped where no row of a tile may
        choose any of them.

        Args:
            x: ``[T, depth]``, as for `project`.
            allowed: see `OutputLayer.most_likely`.
        """
        out = torch.empty(len(x), dtype=torch.int64)
        assert allowed is None or (allowed.shape == (len(x), weight.num_padded // 32) and allowed.is_contiguous())
        weight.kernel("largest_column")(
            *(x.data_ptr(), ctypes.byref(weight.structure), address(allowed), out.data_ptr()),
            *(len(x), weight.num_padded, weight.depth),
        )
        return out
