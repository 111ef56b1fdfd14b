# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# Device code has no Python types: Triton infers them at the launch.
"""The operations of a decoder layer between its products and its attention: three launches, all sums in fp32.

    add_rms_norm:         sum = residual[rows] + addend,   normed = sum / sqrt(mean(sum^2) + epsilon) * weight
    rotate_and_write_kv:  query and key heads: x = x / sqrt(mean(x^2) + epsilon) * norm (where the family norms heads),
                          then x * cos + rotate_half(x) * sin;  keys and values go into the step's slots
    swiglu:               gate / (1 + exp(-gate)) * up

Layout: hidden states ``[T, n]``, products ``[T, columns]``, any row strides; caches
``[num_blocks, block_size, num_kv_heads, head_dim]``. Results are rounded once, when they are stored. A sum is also
rounded before it is normed, so that the norm and the next addition read the same value. Nothing is written in place, so
no thread reads what another thread of its program may have overwritten.

Grids: add_rms_norm has one program per row; rotate_and_write_kv, per row, one for every HEADS_A_PROGRAM query heads and
one for every HEADS_A_PROGRAM KV heads; swiglu, per row, one for every SWIGLU_COLUMNS columns.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.triton.layers.fp8 import (
    ScaledRows,
    gated,
    head_dim_of,
    is_interpreted,
    kv_strides,
    largest_of,
    scale_of,
    store_heads,
    to_fp8,
)

HEADS_A_PROGRAM = 8
SWIGLU_COLUMNS = 1024


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _add_rms_norm_kernel(
    residual, addend, rows, weight, total, normed, scales, epsilon,
    stride_residual_row, stride_addend_row, stride_total_row, stride_normed_row,
    HAS_ADDEND: tl.constexpr, HAS_ROWS: tl.constexpr, SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr,
    LARGEST: tl.constexpr, ROUNDS_FIRST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE_PADDED)
    is_column = column < SIZE
    source = row
    if HAS_ROWS:
        source = tl.load(rows + row)
    x = tl.load(residual + source * stride_residual_row + column, mask=is_column, other=0.0).to(tl.float32)
    if HAS_ADDEND:
        added = tl.load(addend + row * stride_addend_row + column, mask=is_column, other=0.0)
        x = (x + added.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row * stride_total_row + column, x, mask=is_column)
        x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + epsilon)
    factor = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    x = x * scale * factor
    if LARGEST > 0:
        row_scale = scale_of(tl.max(tl.abs(x), 0), LARGEST)
        tl.store(scales + row, row_scale)
        x = to_fp8(x, row_scale, normed, ROUNDS_FIRST)
    tl.store(normed + row * stride_normed_row + column, x, mask=is_column)


@triton.jit
def _rotated_heads(
    heads, norm, cos, sin, is_element, is_dim, epsilon,
    HAS_NORM: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
):  # fmt: skip
    """Both halves of M heads, fp32 ``[M, HALF_PADDED]``: normed if HAS_NORM, then rotated.

    heads: pointers ``[M, HALF_PADDED]`` to the first halves. norm: ``[2 * HALF]``. cos, sin: pointers to the row's.
    """
    dim = tl.arange(0, HALF_PADDED)
    first = tl.load(heads, mask=is_element, other=0.0).to(tl.float32)
    second = tl.load(heads + HALF, mask=is_element, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / (2 * HALF) + epsilon)[:, None]
        first = first * scale * tl.load(norm + dim, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        second = second * scale * tl.load(norm + HALF + dim, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    first_cos = tl.load(cos + dim, mask=is_dim, other=0.0)[None, :]
    first_sin = tl.load(sin + dim, mask=is_dim, other=0.0)[None, :]
    second_cos = tl.load(cos + HALF + dim, mask=is_dim, other=0.0)[None, :]
    second_sin = tl.load(sin + HALF + dim, mask=is_dim, other=0.0)[None, :]
    return first * first_cos - second * first_sin, second * second_cos + first * second_sin


@triton.jit
def _rotate_and_write_kv_kernel(
    qkv, cos, sin, q_norm, k_norm, query, key_cache, value_cache, slots, epsilon,
    stride_qkv_row, stride_cos_row, stride_sin_row, stride_query_row, stride_query_head,
    stride_block, stride_token, stride_head,
    HAS_NORMS: tl.constexpr, NUM_Q_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, M: tl.constexpr, LARGEST: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
):  # fmt: skip
    HEAD_DIM: tl.constexpr = 2 * HALF
    NUM_Q_PROGRAMS: tl.constexpr = (NUM_Q_HEADS + M - 1) // M
    row = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    dim = tl.arange(0, HALF_PADDED)
    is_dim = dim < HALF
    cos += row * stride_cos_row
    sin += row * stride_sin_row
    qkv += row * stride_qkv_row
    if program < NUM_Q_PROGRAMS:
        head = program * M + tl.arange(0, M)
        is_element = (head < NUM_Q_HEADS)[:, None] & is_dim[None, :]
        heads = qkv + head[:, None] * HEAD_DIM + dim[None, :]
        first, second = _rotated_heads(
            heads, q_norm, cos, sin, is_element, is_dim, epsilon, HAS_NORMS, HALF, HALF_PADDED
        )
        target = query + row * stride_query_row + head[:, None] * stride_query_head + dim[None, :]
        tl.store(target, first, mask=is_element)
        tl.store(target + HALF, second, mask=is_element)
    else:
        slot = tl.load(slots + row)
        if slot >= 0:
            kv_head = (program - NUM_Q_PROGRAMS) * M + tl.arange(0, M)
            is_kv_element = (kv_head < NUM_KV_HEADS)[:, None] & is_dim[None, :]
            kv_heads = qkv + (NUM_Q_HEADS + kv_head[:, None]) * HEAD_DIM + dim[None, :]
            first_key, second_key = _rotated_heads(
                kv_heads, k_norm, cos, sin, is_kv_element, is_dim, epsilon, HAS_NORMS, HALF, HALF_PADDED
            )
            kv_heads += NUM_KV_HEADS * HEAD_DIM
            block = slot // BLOCK_SIZE
            place = block * stride_block + slot % BLOCK_SIZE * stride_token
            place = place + kv_head[:, None].to(tl.int64) * stride_head + dim[None, :]
            scale_at = block * (stride_block // 2) + slot % BLOCK_SIZE
            store_heads(
                key_cache, place, first_key, second_key, kv_head, scale_at, is_kv_element,
                NUM_KV_HEADS, HALF, BLOCK_SIZE, LARGEST, ROUNDS_FIRST,
            )  # fmt: skip
            first_value = tl.load(kv_heads, mask=is_kv_element, other=0.0)
            second_value = tl.load(kv_heads + HALF, mask=is_kv_element, other=0.0)
            store_heads(
                value_cache, place, first_value, second_value, kv_head, scale_at, is_kv_element,
                NUM_KV_HEADS, HALF, BLOCK_SIZE, LARGEST, ROUNDS_FIRST,
            )  # fmt: skip


@triton.jit
def _swiglu_kernel(gate_up, out, stride_gate_up_row, stride_out_row, SIZE: tl.constexpr, N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * N + tl.arange(0, N)
    found = gated(gate_up + row * stride_gate_up_row, column, SIZE)
    tl.store(out + row * stride_out_row + column, found, mask=column < SIZE)


def add_rms_norm(
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    *,
    addend: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    normed: torch.Tensor | ScaledRows | None = None,
) -> tuple[torch.Tensor, torch.Tensor | ScaledRows]:
    """Adds the addend to the residual stream, and computes the RMSNorm of the sum.

    Args:
        residual, weight: ``[T, n]`` and ``[n]``.
        addend: ``[R, n]``; None: nothing is added.
        rows: int64 ``[R]``, the rows of residual to use, only with an addend; None: all, R = T.
        normed: ``[R, n]`` to write the norm to, quantised if it is `ScaledRows`; None: a new tensor.
    Returns:
        the sum ``[R, n]``, which is `residual` if there is no addend, and its norm ``[R, n]``.
    Raises:
        ValueError: the launch does not support the shapes, dtypes or strides.
    """
    num_rows = len(residual) if rows is None else len(rows)
    shape = (num_rows, residual.shape[1])
    if rows is not None and (addend is None or rows.dtype != torch.int64 or rows.dim() != 1 or rows.stride(0) != 1):
        raise ValueError("rows must be int64 [R], contiguous, and come with an addend")
    if normed is None:
        normed = residual.new_empty(shape)
    kind = residual.dtype, residual.device
    check_tensor("weight", weight, residual.shape[1:], *kind)
    check_tensor("residual", residual, residual.shape, *kind)
    written, scales = (normed.values, normed.scales) if isinstance(normed, ScaledRows) else (normed, residual)
    largest = largest_of(written)
    check_tensor("normed", written, shape, written.dtype if largest else residual.dtype, residual.device)
    if addend is not None:
        check_tensor("addend", addend, shape, *kind)
    total = residual if addend is None else residual.new_empty(shape)
    if num_rows:
        added = residual if addend is None else addend
        size_padded = max(triton.next_power_of_2(shape[1]), 64)
        _add_rms_norm_kernel[(num_rows,)](
            residual, added, residual if rows is None else rows, weight, total, written, scales, epsilon,
            residual.stride(0), added.stride(0), total.stride(0), written.stride(0),
            HAS_ADDEND=addend is not None, HAS_ROWS=rows is not None, SIZE=shape[1], SIZE_PADDED=size_padded,
            LARGEST=largest, ROUNDS_FIRST=is_interpreted(), num_warps=norm_warps(size_padded), enable_fp_fusion=True,
        )  # fmt: skip
    return total, normed


def norm_warps(size_padded: int) -> int:
    """Warps of an add_rms_norm program: about 16 elements per thread."""
    return min(max(size_padded // 512, 1), 16)


def rotate_and_write_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    num_q_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    epsilon: float = 0.0,
    query: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norms queries and keys if norms are given, rotates them, and writes keys and values to their slots. Returns
    `query`.

    Args:
        qkv: ``[T, (num_q_heads + 2 * num_kv_heads) * head_dim]``: query, key, value heads.
        cos, sin: float32 ``[T, head_dim]``.
        k_cache, v_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``, the same strides; or in fp8 (fp8.py).
        slots: int64 ``[T or more]``, block id * block size + offset; -1: not written.
        q_norm, k_norm: ``[head_dim]``, both or neither.
        query: ``[T, num_q_heads, head_dim]`` to write to; None: a new tensor.
    Raises:
        ValueError: the launch does not support the shapes, dtypes or strides.
    """
    num_rows = len(qkv)
    block_size, num_kv_heads, _ = k_cache.shape[1:]
    head_dim, largest = head_dim_of(k_cache), largest_of(k_cache)
    if head_dim % 2:
        raise ValueError(f"head_dim must be even, got {head_dim}")
    if query is None:
        query = qkv.new_empty((num_rows, num_q_heads, head_dim))
    kind = qkv.dtype, qkv.device
    check_tensor("qkv", qkv, (num_rows, (num_q_heads + 2 * num_kv_heads) * head_dim), *kind)
    check_tensor("query", query, (num_rows, num_q_heads, head_dim), *kind)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, cache, k_cache.shape, k_cache.dtype if largest else qkv.dtype, qkv.device)
    if k_cache.stride() != v_cache.stride():
        raise ValueError(f"cache strides differ: key {k_cache.stride()}, value {v_cache.stride()}")
    for name, angles in (("cos", cos), ("sin", sin)):
        if angles.shape != (num_rows, head_dim) or angles.dtype != torch.float32 or angles.stride(1) != 1:
            raise ValueError(f"{name} must be float32 [{num_rows}, {head_dim}], contiguous along head_dim")
    if slots.dtype != torch.int64 or slots.dim() != 1 or slots.stride(0) != 1 or len(slots) < num_rows:
        raise ValueError(f"slots must be int64 [{num_rows} or more], contiguous")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("query and key heads are normed both, or neither")
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            check_tensor(name, norm, (head_dim,), *kind)
    if num_rows:
        num_programs = triton.cdiv(num_q_heads, HEADS_A_PROGRAM) + triton.cdiv(num_kv_heads, HEADS_A_PROGRAM)
        _rotate_and_write_kv_kernel[(num_rows, num_programs)](
            qkv, cos, sin, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
            query, k_cache, v_cache, slots, epsilon,
            qkv.stride(0), cos.stride(0), sin.stride(0), *query.stride()[:2], *kv_strides(k_cache),
            HAS_NORMS=q_norm is not None, NUM_Q_HEADS=num_q_heads, NUM_KV_HEADS=num_kv_heads, HALF=head_dim // 2,
            HALF_PADDED=triton.next_power_of_2(head_dim // 2), BLOCK_SIZE=block_size, M=HEADS_A_PROGRAM,
            LARGEST=largest, ROUNDS_FIRST=is_interpreted(), num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return query


def swiglu(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up of ``[T, 2 n]``, gate beside up, into `out` ``[T, n]`` or a new tensor. Raises `ValueError` if
    the launch does not support the shapes, dtypes or strides."""
    num_rows, size = len(gate_up), gate_up.shape[1] // 2
    if out is None:
        out = gate_up.new_empty((num_rows, size))
    check_tensor("gate_up", gate_up, (num_rows, 2 * size), gate_up.dtype, gate_up.device)
    check_tensor("out", out, (num_rows, size), gate_up.dtype, gate_up.device)
    if num_rows:
        _swiglu_kernel[(num_rows, triton.cdiv(size, SWIGLU_COLUMNS))](
            gate_up, out, gate_up.stride(0), out.stride(0), SIZE=size, N=SWIGLU_COLUMNS,
            num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def check_tensor(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raises `ValueError`, with `name`, unless `tensor` has this `shape`, `dtype` and `device`. See `torch.Tensor`."""
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device or tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} must be {dtype} {list(shape)} on {device} and contiguous along its last dimension, "
            f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device} with strides {tensor.stride()}"
        )
