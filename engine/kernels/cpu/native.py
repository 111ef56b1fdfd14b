"""The C++ kernels of cpp/ on torch tensors: linear layers, and the arg max over their output columns.

Without a C++ compiler `engine.kernels.cpu.torch_attention` is used instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.kernels import cdiv
from engine.kernels.cpu.attention_shape import TILE_ROWS, AttentionShape
from engine.kernels.cpu.native_build import declare, load_library
from engine.kernels.cpu.native_functions import DRAW_TOKENS, ELEMENT_TYPES, KERNELS


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """Weights of a linear layer in the memory layout that the matrix kernels read.

    Attributes:
        panels: bfloat16 or float32, panels of 32 output columns.
        bias: of the same type, ``[num_columns]``.
        is_gated: whether a panel holds 16 columns of the gate, then the same 16 columns of up.
    """

    panels: torch.Tensor
    bias: torch.Tensor | None
    num_columns: int
    depth: int
    is_gated: bool

    def columns(self, index: torch.Tensor) -> torch.Tensor:
        """int64 ``[n]`` -> ``[n, depth]``: the weights of these output columns, unpacked."""
        assert not self.is_gated, "a column index is ambiguous between gate and up"
        words = self.panels.view(torch.int32)[..., 0]
        return words[index // 32, :, index % 32].view(self.panels.dtype)


def in_one_allocation(weights: Sequence[PackedWeight]) -> list[PackedWeight]:
    """Copies of the weights in one allocation, so that small weights share pages of 2 MB."""
    joined = torch.cat([weight.panels.flatten() for weight in weights])
    parts = torch.split(joined, [weight.panels.numel() for weight in weights])
    return [replace(weight, panels=part.view_as(weight.panels)) for weight, part in zip(weights, parts, strict=True)]


class NativeKernels(AttentionShape):
    """The kernels for one element type and one attention shape.

    Args:
        dtype: of all tensors, bfloat16 or float32.
        block_size: tokens in a KV block, a multiple of 32.
        folder: where compiled kernels are stored.
    Raises:
        ValueError: the shape or the element type is not supported.
        NativeBuildError: there is no compiler, or it fails.
    """

    def __init__(
        self, *, num_q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int, folder: Path
    ) -> None:
        if dtype not in ELEMENT_TYPES:
            raise ValueError(f"element type {dtype} is not one of {', '.join(map(str, ELEMENT_TYPES))}")
        super().__init__(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size)
        self.dtype = dtype
        self.library = load_library(folder, "native")
        kernels = {f"{name}_{ELEMENT_TYPES[dtype]}": types for name, types in KERNELS.items()}
        declare(self.library, {**kernels, "draw_tokens": DRAW_TOKENS})
        self.has_products = dtype == torch.float32 or bool(self.library.has_products())

    def kernel(self, name: str) -> Callable[..., None]:
        """The function of `native_build.KERNELS` for this element type."""
        found: Callable[..., None] = getattr(self.library, f"{name}_{ELEMENT_TYPES[self.dtype]}")
        return found

    def copy_rows(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of ``[T, n]`` in memory as `project` needs it."""
        return self._rows(*x.shape).copy_(x)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedWeight | None:
        """Packs ``[n, depth]`` weights for `project`; None where the kernels do not support the size or processor."""
        num_columns, depth = weight.shape
        if not self.has_products or num_columns % 32 or depth % 32:
            return None
        # [panel, word along the depth, column, element of the word]: a word of 4 bytes holds a pair of bf16.
        size = 4 // weight.itemsize
        panels = weight.view(num_columns // 32, 32, depth // size, size).permute(0, 2, 1, 3).contiguous()
        return PackedWeight(panels=panels, bias=bias, num_columns=num_columns, depth=depth, is_gated=False)

    def pack_gated(self, gate: torch.Tensor, up: torch.Tensor) -> PackedWeight | None:
        """Packs two ``[n, depth]`` weights so that `project` computes silu(gate) * up; None as for `pack`."""
        if gate.shape[0] % 16:
            return None
        halves = torch.stack([gate.view(-1, 16, gate.shape[1]), up.view(-1, 16, up.shape[1])], dim=1)
        packed = self.pack(halves.view(-1, gate.shape[1]))
        return None if packed is None else replace(packed, is_gated=True)

    def project(self, x: torch.Tensor, weight: PackedWeight, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The linear layer, plus `residual` if given: ``[T, depth]`` -> ``[T, columns]``.

        Args:
            x: output of a kernel or of `copy_rows`; its memory reaches to a multiple of 32 rows.
        """
        out = self._rows(len(x), weight.num_columns // 2 if weight.is_gated else weight.num_columns)
        bias, added = (0 if addend is None else addend.data_ptr() for addend in (weight.bias, residual))
        self.kernel("project")(
            *(x.data_ptr(), weight.panels.data_ptr(), bias, added, out.data_ptr()),
            *(len(x), weight.num_columns, weight.depth, weight.is_gated),
        )
        return out

    def largest_column(
        self, x: torch.Tensor, weight: PackedWeight, allowed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The arg max over the linear layer's output columns, the lowest on ties: int64 ``[T]``.

        Outputs are compared in float32 and not stored. A panel of 32 columns is skipped where no row of a tile may
        choose any of them.

        Args:
            x: ``[T, depth]``, as for `project`.
            allowed: see `OutputLayer.most_likely`.
        """
        out = torch.empty(len(x), dtype=torch.int64)
        bias, masks = (0 if given is None else given.data_ptr() for given in (weight.bias, allowed))
        assert allowed is None or (allowed.shape == (len(x), weight.num_columns // 32) and allowed.is_contiguous())
        self.kernel("largest_column")(
            *(x.data_ptr(), weight.panels.data_ptr(), bias, masks, out.data_ptr()),
            *(len(x), weight.num_columns, weight.depth),
        )
        return out

    def _rows(self, num_rows: int, num_columns: int) -> torch.Tensor:
        """Uninitialised ``[num_rows, num_columns]``, allocated for whole tiles of rows, which the kernels read."""
        return torch.empty(cdiv(num_rows, TILE_ROWS) * TILE_ROWS, num_columns, dtype=self.dtype)[:num_rows]
