"""The CPU kernels of cpp/, called on torch tensors: attention, norms, rotation, SwiGLU and bf16 products.

Without a C++ compiler `engine.kernels.cpu.torch_attention` computes everything.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels import cdiv
from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.cpu.native_build import ELEMENT_TYPES, KERNELS, load_library

Ints = npt.NDArray[np.int64]

SUB_BLOCK_TOKENS = 32
"""KV tokens that lie together; a block size is a multiple of it."""

TILE_ROWS = 32
"""Query rows, a token's query heads of one KV head each, that one piece of work takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeWork:
    """One step's attention, prepared once and used by every layer. Items are what one thread does for one KV head.

    Attributes:
        slots: int64 ``[T]``, where each row's key and value are written.
        shared: int64 ``[n, 4]``: first row, number of rows, start in prefix_blocks, prefix tokens; rows of several
            sequences of a group against their prefix, which is read once for all of them.
        own: int64 ``[m, 7]``: first row, number of rows, start in own_blocks, own tokens that the first row sees,
            start in prefix_blocks, prefix tokens to attend to as well (0 where `shared` did), whether `shared` did.
        prefix_blocks, own_blocks: int32 block tables.
        state: float32 scratch, what `shared` hands to `own`.
    """

    slots: Ints
    shared: Ints
    own: Ints
    prefix_blocks: npt.NDArray[np.int32]
    own_blocks: npt.NDArray[np.int32]
    state: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """Weights of a linear layer in the order in which products on tiles or vectors read them.

    Attributes:
        panels: bfloat16, panels of 32 output columns.
        bias: bfloat16 ``[columns]``.
        is_gated: whether a panel holds 16 columns of a gate and the same 16 of what it gates.
    """

    panels: torch.Tensor
    bias: torch.Tensor | None
    num_columns: int
    depth: int
    is_gated: bool

    def columns(self, index: torch.Tensor) -> torch.Tensor:
        """int64 ``[n]`` -> bfloat16 ``[n, depth]``: the weights of some output columns, as the layer had them."""
        assert not self.is_gated, "columns of two layers"
        pairs = self.panels.view(torch.int32)[..., 0]
        return pairs[index // 32, :, index % 32].view(self.panels.dtype)


class NativeKernels:
    """The kernels for one element type and one shape of attention.

    Args:
        dtype: bfloat16 or float32; of all tensors.
        block_size: tokens in a KV block, a multiple of 32.
        folder: where compiled kernels are kept.
    Raises:
        ValueError: the shape or the element type is not covered.
        NativeBuildError: there is no compiler, or it fails.
    """

    def __init__(
        self, *, num_q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int, folder: Path
    ) -> None:
        if dtype not in ELEMENT_TYPES:
            raise ValueError(f"element type {dtype} is not one of {', '.join(map(str, ELEMENT_TYPES))}")
        if block_size % SUB_BLOCK_TOKENS:
            raise ValueError(f"block_size {block_size} is not a multiple of {SUB_BLOCK_TOKENS}")
        if head_dim % 16 or head_dim > 256:
            raise ValueError(f"head dim {head_dim} is not a multiple of 16 up to 256")
        if num_q_heads // num_kv_heads > TILE_ROWS:
            raise ValueError(f"{num_q_heads // num_kv_heads} query heads a KV head are more than {TILE_ROWS}")
        self.num_q_heads, self.num_kv_heads, self.head_dim = num_q_heads, num_kv_heads, head_dim
        self.dtype, self.block_size = dtype, block_size
        self._tile_tokens = TILE_ROWS * num_kv_heads // num_q_heads
        library, suffix = load_library(folder), ELEMENT_TYPES[dtype]
        self._attend, self._rms_norm, self._rotate_and_store, self._swiglu = (
            getattr(library, f"{name}_{suffix}") for name in KERNELS
        )
        self._project, self._largest_column = library.project_bf16, library.largest_column_bf16
        self.compute_layers = library.compute_layers_bf16
        self.has_products = dtype == torch.bfloat16 and bool(library.has_products())
        self._state = torch.empty(0)
        self._scratch = torch.empty(0, dtype=dtype)

    def prepare(self, batch: AttentionBatch) -> NativeWork:
        """Cuts a step's rows into items. Called once a step.

        Rows of short sequences of one group meet in tiles for their prefix; a sequence with enough rows to fill tiles
        attends to prefix and own KV in one go.
        """
        num_rows = np.diff(batch.cu_seqlens_q).astype(np.int64)
        group_of = np.repeat(np.arange(batch.num_groups), np.diff(batch.group_starts))
        prefix_len = batch.prefix_lens[group_of].astype(np.int64)
        is_short = (num_rows < self._tile_tokens) & (prefix_len > 0)
        # Alone with its prefix, a short sequence shares it with nobody.
        num_short = np.bincount(group_of, weights=is_short, minlength=batch.num_groups)
        is_short &= num_short[group_of] > 1
        own_sequence, own_offset, own_count = _cut(num_rows, self._tile_tokens)
        first_visible = batch.suffix_lens.astype(np.int64) - num_rows + 1
        own = np.stack(
            [
                batch.cu_seqlens_q[own_sequence] + own_offset,
                own_count,
                batch.suffix_block_starts[own_sequence],
                first_visible[own_sequence] + own_offset,
                batch.prefix_block_starts[group_of[own_sequence]],
                np.where(is_short, 0, prefix_len)[own_sequence],
                is_short[own_sequence],
            ],
            axis=1,
            dtype=np.int64,
        )
        cost = own[:, 1] * (own[:, 3] + own[:, 5])
        shared = self._shared_items(batch, is_short, group_of)
        size = batch.num_rows * self.num_q_heads * (self.head_dim + 2) if len(shared) else 0
        if self._state.numel() < size:
            self._state = torch.empty(size)
        return NativeWork(
            slots=np.ascontiguousarray(batch.slot_mapping),
            shared=shared,
            own=np.ascontiguousarray(own[np.argsort(-cost, kind="stable")]),
            prefix_blocks=np.ascontiguousarray(batch.prefix_block_ids),
            own_blocks=np.ascontiguousarray(batch.suffix_block_table),
            state=self._state,
        )

    def _shared_items(self, batch: AttentionBatch, is_short: npt.NDArray[np.bool_], group_of: Ints) -> Ints:
        """Runs of neighbouring short sequences of a group, cut into tiles."""
        is_next_same = is_short[1:] & is_short[:-1] & (group_of[1:] == group_of[:-1])
        starts = is_short & ~np.concatenate([[False], is_next_same])
        ends = is_short & ~np.concatenate([is_next_same, [False]])
        first = batch.cu_seqlens_q[:-1][starts].astype(np.int64)
        run_rows = batch.cu_seqlens_q[1:][ends] - first
        run, offset, count = _cut(run_rows, self._tile_tokens)
        group = group_of[starts][run]
        items = [first[run] + offset, count, batch.prefix_block_starts[group], batch.prefix_lens[group]]
        shared = np.stack(items, axis=1, dtype=np.int64)
        return np.ascontiguousarray(shared[np.argsort(-shared[:, 1] * shared[:, 3], kind="stable")])

    def attend(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, work: NativeWork, *, scale: float
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`.

        Query rows may be strided, heads lie together. The caches are laid out in the order of cpp/attention.h.
        """
        out = self._rows(query.shape[0], self.num_q_heads * self.head_dim)
        self._attend(
            *(query.data_ptr(), query.stride(0), out.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr()),
            *(self.num_q_heads, self.num_kv_heads, self.head_dim, self.block_size, scale),
            *(work.shared.ctypes.data, len(work.shared), work.own.ctypes.data, len(work.own)),
            *(work.prefix_blocks.ctypes.data, work.own_blocks.ctypes.data, work.state.data_ptr()),
        )
        return out.view(-1, self.num_q_heads, self.head_dim)

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, work: NativeWork
    ) -> None:
        """See `AttentionBackend.write_kv`."""
        qkv = torch.cat([key.new_zeros(len(key), self.num_q_heads, self.head_dim), key, value], dim=1).flatten(1)
        cos, sin = torch.ones(len(key), self.head_dim), torch.zeros(len(key), self.head_dim)
        self.rotate_and_write_kv(qkv, cos, sin, k_cache, v_cache, work)

    def copy_rows(self, x: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """``[T, n]``, int64 ``[R]`` -> ``[R, n]``: some rows, or all, as `project` takes them."""
        if rows is None:
            return self._rows(*x.shape).copy_(x)
        return torch.index_select(x, 0, rows, out=self._rows(len(rows), x.shape[1]))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Divides each row by its root mean square and multiplies it by the weight: ``[T, n]``.

        Args:
            x: ``[T, n]``.
            weight: ``[n]``.
            epsilon: added to the mean square.
        """
        out = self._rows(*x.shape)
        self._rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), *x.shape, epsilon)
        return out

    def rotate_and_write_kv(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        work: NativeWork,
        *,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        epsilon: float = 0.0,
    ) -> None:
        """Norms (where norms are given) and rotates query and key heads in place, and writes the step's KV.

        Args:
            qkv: ``[T, (num_q_heads + 2 * num_kv_heads) * head_dim]``, contiguous.
            cos, sin: float32 ``[T, head_dim]``, contiguous.
            q_norm, k_norm: ``[head_dim]``.
        """
        norms = (0 if norm is None else norm.data_ptr() for norm in (q_norm, k_norm))
        self._rotate_and_store(
            *(qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), *norms, epsilon, work.slots.ctypes.data),
            *(k_cache.data_ptr(), v_cache.data_ptr(), qkv.shape[0]),
            *(self.num_q_heads, self.num_kv_heads, self.head_dim, self.block_size),
        )

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``[T, 2 n]``, gate beside up -> ``[T, n]``: silu(gate) * up."""
        out = self._rows(gate_up.shape[0], gate_up.shape[1] // 2)
        self._swiglu(gate_up.data_ptr(), out.data_ptr(), *out.shape)
        return out

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedWeight | None:
        """``[n, depth]`` weights of a linear layer for `project`; None where only torch multiplies them."""
        num_columns, depth = weight.shape
        if not self.has_products or num_columns % 32 or depth % 32:
            return None
        # Panel, pair of depth, column, one of the pair.
        panels = weight.view(num_columns // 32, 32, depth // 2, 2).permute(0, 2, 1, 3).contiguous()
        return PackedWeight(panels=panels, bias=bias, num_columns=num_columns, depth=depth, is_gated=False)

    def pack_gated(self, gate: torch.Tensor, up: torch.Tensor) -> PackedWeight | None:
        """Two ``[n, depth]`` weights, so that `project` gives silu(gate) * up in one go; None as for `pack`."""
        if gate.shape[0] % 16:
            return None
        halves = torch.stack([gate.view(-1, 16, gate.shape[1]), up.view(-1, 16, up.shape[1])], dim=1)
        packed = self.pack(halves.view(-1, gate.shape[1]))
        return None if packed is None else replace(packed, is_gated=True)

    def project(self, x: torch.Tensor, weight: PackedWeight, residual: torch.Tensor | None = None) -> torch.Tensor:
        """``[T, depth]`` -> ``[T, columns]``: the linear layer, plus the residual stream where one is given.

        Args:
            x: from one of these kernels, whose outputs lie in memory for rows rounded up to 32.
            residual: ``[T, columns]``.
        """
        out = self._rows(len(x), weight.num_columns // 2 if weight.is_gated else weight.num_columns)
        bias, added = (0 if addend is None else addend.data_ptr() for addend in (weight.bias, residual))
        self._project(
            *(x.data_ptr(), weight.panels.data_ptr(), bias, added, out.data_ptr()),
            *(len(x), weight.num_columns, weight.depth, weight.is_gated),
        )
        return out

    def largest_column(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """``[T, depth]``, as for `project` -> int64 ``[T]``: the linear layer's largest column, the first of equals.

        The output is compared in float32 as it is computed, and never written.
        """
        out = torch.empty(len(x), dtype=torch.int64)
        bias = 0 if weight.bias is None else weight.bias.data_ptr()
        self._largest_column(
            *(x.data_ptr(), weight.panels.data_ptr(), bias, out.data_ptr()),
            *(len(x), weight.num_columns, weight.depth),
        )
        return out

    def scratch(self, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Uninitialised memory of so many elements each, the same for every step: what a step left in it is lost."""
        if self._scratch.numel() < sum(sizes):
            self._scratch = torch.empty(sum(sizes), dtype=self.dtype)
        return tuple(torch.split(self._scratch[: sum(sizes)], list(sizes)))

    def _rows(self, num_rows: int, num_columns: int) -> torch.Tensor:
        """Uninitialised ``[num_rows, num_columns]``; products read whole tiles, so memory reaches to their end."""
        return torch.empty(cdiv(num_rows, TILE_ROWS) * TILE_ROWS, num_columns, dtype=self.dtype)[:num_rows]


def _cut(lengths: Ints, most: int) -> tuple[Ints, Ints, Ints]:
    """Ranges cut into pieces of at most `most`: each piece's range, offset in it, and length."""
    num_pieces = cdiv(lengths, most)
    owner = np.repeat(np.arange(len(lengths)), num_pieces)
    offset = (np.arange(len(owner)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)) * most
    return owner, offset, np.minimum(lengths[owner] - offset, most)
