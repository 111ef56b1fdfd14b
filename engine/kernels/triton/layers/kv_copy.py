# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# Device code has no Python types: Triton infers them at the launch.
"""A copy of a step's fp8 KV in the format of its queries, for steps in which many rows read each key and value.

Matrix units do not take an fp8 operand beside one of 16 bits. A tile that reads fp8 moves keys and values from shared
memory to registers, converts them, and moves them back, while the matrix units wait; and every tile does so again. A
copy is converted once a layer, and tiles read it as if the cache had 16 bits.
"""

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from engine.kernels.triton.layers.fp8 import kv_scales
from engine.kernels.triton.tile_jobs import SLOT_BITS

TOKENS_A_ROW = 4
"""A step's KV is copied if its blocks have at most so many tokens for each of the step's rows. This bounds the memory
of a copy by the rows of a step, and its time: where nothing is gained, by its bytes 2 % of a step of an 8B model."""

ELEMENTS_A_PROGRAM = 4096


@triton.jit
def _copy_vectors(
    cache, copy, block, number, stride_block,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,
):  # fmt: skip
    """M vectors, of tokens and heads, of one block."""
    SIZE: tl.constexpr = BLOCK_SIZE * NUM_KV_HEADS
    vector = tl.program_id(1) * M + tl.arange(0, M)
    dim = tl.arange(0, HEAD_DIM_PADDED)
    is_vector = vector < SIZE
    is_element = is_vector[:, None] & (dim < HEAD_DIM)[None, :]
    where = vector[:, None] * HEAD_DIM + dim[None, :]
    scales = kv_scales(cache, vector % NUM_KV_HEADS, HEAD_DIM, NUM_KV_HEADS, BLOCK_SIZE)
    scale = tl.load(scales + block * (stride_block // 2) + vector // NUM_KV_HEADS, mask=is_vector, other=0.0)
    found = tl.load(cache + block * stride_block + where, mask=is_element, other=0.0).to(tl.float32)
    tl.store(copy + number * SIZE * HEAD_DIM + where, found * scale.to(tl.float32)[:, None], mask=is_element)


@triton.jit
def _copy_kv_kernel(
    key_cache, value_cache, block_ids, keys, values, stride_block,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,
):  # fmt: skip
    """Programs: blocks, parts of a block, keys and values."""
    number = tl.program_id(0).to(tl.int64)
    block = tl.load(block_ids + number).to(tl.int64)
    if tl.program_id(2) == 0:
        _copy_vectors(
            key_cache, keys, block, number, stride_block, NUM_KV_HEADS, HEAD_DIM, HEAD_DIM_PADDED, BLOCK_SIZE, M
        )
    else:
        _copy_vectors(
            value_cache, values, block, number, stride_block, NUM_KV_HEADS, HEAD_DIM, HEAD_DIM_PADDED, BLOCK_SIZE, M
        )


class KvCopy:
    """Room for a copy, in dtype, of the blocks ``[block_size, num_kv_heads, head_dim]`` of a block table, int32 entries
    (tile_jobs.py), each once; every layer fills it again. `block_table` has the copied blocks' entries."""

    def __init__(
        self,
        block_table: npt.NDArray[np.int32],
        block_shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        block_ids, places = np.unique(block_table >> SLOT_BITS, return_inverse=True)  # packs list blocks a second time
        self.block_table = places.astype(np.int32) << SLOT_BITS | block_table & ((1 << SLOT_BITS) - 1)
        ids = torch.from_numpy(block_ids)
        self._block_ids = ids.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else ids
        self._caches = torch.empty((2, len(block_ids), *block_shape), dtype=dtype, device=device)

    def of(self, key_cache: torch.Tensor, value_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies the blocks of a layer's fp8 caches, in one launch; slots that were never written become anything."""
        keys, values = self._caches
        block_size, num_kv_heads, head_dim = keys.shape[1:]
        head_dim_padded = triton.next_power_of_2(head_dim)
        vectors = ELEMENTS_A_PROGRAM // head_dim_padded
        _copy_kv_kernel[(len(keys), triton.cdiv(block_size * num_kv_heads, vectors), 2)](
            key_cache, value_cache, self._block_ids, keys, values, key_cache.stride(0),
            NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, HEAD_DIM_PADDED=head_dim_padded, BLOCK_SIZE=block_size,
            M=vectors, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
        return keys, values
