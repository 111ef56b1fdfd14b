# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# Device code has no Python types: Triton infers them at the launch.
"""Writes a step's keys and values into the paged caches: one launch for both, rows without a slot skipped.

Layout: key and value ``[T, num_kv_heads, head_dim]``, any row and head strides; caches
``[num_blocks, block_size, num_kv_heads, head_dim]``. Grid: one program a row.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _write_kv_kernel(
    key, value, key_cache, value_cache, slots,
    stride_key_row, stride_key_head, stride_value_row, stride_value_head, stride_block, stride_token, stride_head,
    NUM_KV_HEADS: tl.constexpr, NUM_KV_HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot >= 0:
        head = tl.arange(0, NUM_KV_HEADS_PADDED).to(tl.int64)[:, None]
        dim = tl.arange(0, HEAD_DIM_PADDED)[None, :]
        is_element = (head < NUM_KV_HEADS) & (dim < HEAD_DIM)
        target = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_token + head * stride_head + dim
        found = tl.load(key + row * stride_key_row + head * stride_key_head + dim, mask=is_element)
        tl.store(key_cache + target, found, mask=is_element)
        found = tl.load(value + row * stride_value_row + head * stride_value_head + dim, mask=is_element)
        tl.store(value_cache + target, found, mask=is_element)


def write_kv(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Writes rows ``[T, num_kv_heads, head_dim]`` to slots int64 ``[T]`` (block id * block size + offset; -1: nowhere).

    Raises:
        ValueError: head_dim is not contiguous, the caches' strides differ, or there are more rows than slots.
    """
    num_rows, num_kv_heads, head_dim = key.shape
    if key_cache.stride() != value_cache.stride():
        raise ValueError(f"cache strides differ: key {key_cache.stride()}, value {value_cache.stride()}")
    if any(tensor.stride(-1) != 1 for tensor in (key, value, key_cache)):
        raise ValueError("key, value and caches must be contiguous along head_dim")
    if key.shape != value.shape or num_rows > len(slots):
        raise ValueError(f"key {tuple(key.shape)}, value {tuple(value.shape)} and {len(slots)} slots do not fit")
    _write_kv_kernel[(num_rows,)](
        key, value, key_cache, value_cache, slots,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1), *key_cache.stride()[:3],
        NUM_KV_HEADS=num_kv_heads, NUM_KV_HEADS_PADDED=triton.next_power_of_2(num_kv_heads),
        HEAD_DIM=head_dim, HEAD_DIM_PADDED=triton.next_power_of_2(head_dim), BLOCK_SIZE=key_cache.shape[1],
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
