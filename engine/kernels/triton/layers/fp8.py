# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# Device code has no Python types: Triton infers them at the launch.
"""8-bit floating point (e4m3): rows and weights with one fp32 scale per row, KV with one bf16 scale per token and head.

    scale = max(|x|) / LARGEST,   x is about fp8(x / scale) * scale

A KV block has the values ``[block_size, num_kv_heads, head_dim]``, then the scales ``[num_kv_heads, block_size]`` of 2
bytes each, so that values stay aligned and the scales of one head are contiguous. As a tensor the cache has the shape
``[num_blocks, block_size, num_kv_heads, head_dim + 2]``, in bytes.
"""

import re
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
"""The format of NVIDIA and of AMD's gfx95x, and that of AMD's gfx94x, whose largest number is 240."""

LEAST = tl.constexpr(1e-12)
"""Lower bound of a row's largest magnitude, so that a row of zeros has a scale above 0."""

SCALE_BYTES = tl.constexpr(2)

NO_KERNEL = "not.*supported|cutlass cannot"
"""In the messages of torch where it has no kernel with a scale per row: cuBLAS for some sizes, such as few rows of many
columns on an H100; CUTLASS, which torch takes on other NVIDIA GPUs, for devices that torch is not built for."""

_SCALED_AFTERWARDS: set[tuple[int, ...]] = set()
"""Products for which torch has said that it has no kernel with a scale per row: rows, depth, columns, no bias. Its
refusal takes the host as long as several launches, and a step has over a hundred products."""


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """Quantised rows, the operands of `torch._scaled_mm`: fp8 values ``[T, n]`` and fp32 scales ``[T, 1]``."""

    values: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def empty(cls, num_rows: int, size: int, dtype: torch.dtype, device: torch.device) -> "ScaledRows":
        """`num_rows` uninitialised rows of `size` numbers. See `ScaledRows`."""
        scales = torch.empty((num_rows, 1), dtype=torch.float32, device=device)
        return cls(torch.empty((num_rows, size), dtype=dtype, device=device), scales)


def quantize_weights(weights: torch.Tensor, dtype: torch.dtype) -> ScaledRows:
    """Quantises weights ``[columns, depth]`` with one scale per column of the product."""
    values = weights.float()
    scales = values.abs().amax(dim=1, keepdim=True).clamp(min=LEAST.value) / torch.finfo(dtype).max
    return ScaledRows((values / scales).to(dtype), scales)


def scaled_linear(
    rows: ScaledRows, weights: ScaledRows, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """The product of rows and weights: ``[T, columns]`` of out_dtype.

    Args:
        rows: ``[T, depth]``.
        weights: ``[columns, depth]``, in the same format.
        bias: ``[columns]``.
    """
    if rows.values.is_cpu and torch.__version__ < "2.13":  # older torch supports only one scale per matrix on a CPU
        found = rows.values.float() @ weights.values.float().t()
    else:
        factors = rows.values, weights.values.t()
        product = (*rows.values.shape, len(weights.values), bias is None)
        if product not in _SCALED_AFTERWARDS:
            try:
                return torch._scaled_mm(
                    *factors, scale_a=rows.scales, scale_b=weights.scales.t(), bias=bias, out_dtype=out_dtype,
                    use_fast_accum=True,
                )  # fmt: skip
            except RuntimeError as error:
                if not re.search(NO_KERNEL, str(error), re.IGNORECASE):
                    raise
                _SCALED_AFTERWARDS.add(product)
        one = torch.ones((), dtype=torch.float32, device=rows.values.device)
        found = torch._scaled_mm(*factors, scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=True)
    found *= rows.scales  # in place: of a prompt's rows it may be a gigabyte
    found *= weights.scales.t()
    if bias is not None:
        found += bias
    return found.to(out_dtype)


def is_interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU."""
    return bool(triton.knobs.runtime.interpret)


def largest_of(tensor: torch.Tensor) -> float:
    """The largest number of a tensor's 8-bit format; 0 for a tensor in another format, which has no scales."""
    return torch.finfo(tensor.dtype).max if tensor.dtype in FP8_DTYPES else 0.0


def head_dim_of(cache: torch.Tensor) -> int:
    """The head dim of a KV cache; the last dimension of an fp8 cache includes the scales."""
    return cache.shape[3] - (int(SCALE_BYTES.value) if cache.dtype in FP8_DTYPES else 0)


def kv_strides(cache: torch.Tensor) -> tuple[int, int, int]:
    """The strides of a KV cache's blocks, tokens and heads, in elements. Raises `ValueError` if the cache is in fp8 and
    its blocks are not contiguous, as the layout of scales requires."""
    block, token, head, _ = cache.stride()
    if cache.dtype not in FP8_DTYPES:
        return block, token, head
    if not cache[0].is_contiguous() or block % 16:
        raise ValueError(f"blocks of a KV cache in fp8 must be contiguous and of 16 bytes each, got {cache.stride()}")
    head_dim = head_dim_of(cache)
    return block, cache.shape[2] * head_dim, head_dim


@triton.jit
def scale_of(largest, LARGEST: tl.constexpr):
    """The scale of elements with this largest magnitude."""
    return tl.maximum(largest, LEAST) / LARGEST


@triton.jit
def to_fp8(x, scale, out, ROUNDS_FIRST: tl.constexpr):
    """Rounds fp32 x / scale to the 8-bit format that `out` points to: to nearest, ties to even.

    ROUNDS_FIRST: round in fp32 first, because Triton's interpreter neither carries into the exponent nor rounds
    subnormal numbers. A subnormal number is rounded by adding a number whose last bit is that of the format.
    """
    x = x / scale
    if ROUNDS_FIRST:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        IS_FNUZ: tl.constexpr = out.dtype.element_ty == tl.float8e4b8
        SMALLEST: tl.constexpr = 0.0078125 if IS_FNUZ else 0.015625
        MAGIC: tl.constexpr = 12288.0 if IS_FNUZ else 24576.0
        x = tl.where(tl.abs(x) < SMALLEST, (x + MAGIC) - MAGIC, bits.to(tl.float32, bitcast=True))
    return x.to(out.dtype.element_ty)


@triton.jit
def kv_scales(cache, kv_head, HEAD_DIM: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Pointer to the scale of a head in slot 0 of block 0; the stride of blocks is stride_block // 2 elements."""
    scales = cache + BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM + kv_head * BLOCK_SIZE * SCALE_BYTES
    return scales.to(tl.pointer_type(tl.bfloat16), bitcast=True)


@triton.jit
def store_heads(
    cache, place, first, second, kv_head, scale_at, is_element, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, LARGEST: tl.constexpr, ROUNDS_FIRST: tl.constexpr,
):  # fmt: skip
    """Stores both halves of M heads of one token, ``[M, HALF_PADDED]`` each, in a cache; quantised if LARGEST > 0."""
    if LARGEST > 0:
        first = first.to(tl.float32)
        second = second.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
        scale = scale_of(largest, LARGEST).to(tl.bfloat16)
        scales = kv_scales(cache, kv_head, 2 * HALF, NUM_KV_HEADS, BLOCK_SIZE)
        tl.store(scales + scale_at, scale, mask=kv_head < NUM_KV_HEADS)
        first = to_fp8(first, scale.to(tl.float32)[:, None], cache, ROUNDS_FIRST)
        second = to_fp8(second, scale.to(tl.float32)[:, None], cache, ROUNDS_FIRST)
    tl.store(cache + place, first, mask=is_element)
    tl.store(cache + place + HALF, second, mask=is_element)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _quantize_rows_kernel(
    x, rows, row_parts, out, scales, stride_x_row, stride_out_row, stride_part_row,
    HAS_ROWS: tl.constexpr, SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr, LARGEST: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE_PADDED)
    source = row
    if HAS_ROWS:
        source = tl.load(rows + row)
    is_element = column < tl.where(tl.load(row_parts + source * stride_part_row) > 0, SIZE, 0)
    elements = tl.load(x + source * stride_x_row + column, mask=is_element, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(elements), 0), LARGEST)
    tl.store(scales + row, scale)
    tl.store(out + row * stride_out_row + column, to_fp8(elements, scale, out, ROUNDS_FIRST), mask=column < SIZE)


@triton.jit
def gated(gates, column, SIZE: tl.constexpr):
    """silu(gate) * up of some columns in fp32; 0 after the last column."""
    is_column = column < SIZE
    gate = tl.load(gates + column, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gates + column + SIZE, mask=is_column, other=0.0).to(tl.float32)
    decay = tl.exp(-tl.abs(gate))  # never overflows
    return gate * tl.where(gate >= 0.0, 1.0, decay) / (1.0 + decay) * up


@triton.jit
def _quantized_swiglu_kernel(
    gate_up, out, scales, stride_gate_up_row, stride_out_row,
    SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr, LARGEST: tl.constexpr, ROUNDS_FIRST: tl.constexpr,
):  # fmt: skip
    """One program per row, all of it in registers: its scale is known before anything is stored."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE_PADDED)
    found = gated(gate_up + row * stride_gate_up_row, column, SIZE)
    scale = scale_of(tl.max(tl.abs(found), 0), LARGEST)
    tl.store(scales + row, scale)
    tl.store(out + row * stride_out_row + column, to_fp8(found, scale, out, ROUNDS_FIRST), mask=column < SIZE)


def quantize_rows(x: torch.Tensor, out: ScaledRows, row_parts: torch.Tensor, rows: torch.Tensor | None = None) -> None:
    """Quantises rows of attention's result; rows that no tile has written become zeros.

    Args:
        x, out: ``[T, n]``, and R rows of n to write.
        row_parts: int32 ``[T or more]``, any stride: number of parts of each row's attention; 0: not written.
        rows: int64 ``[R]``, the rows of x to quantise; None: all, R = T.
    """
    num_rows, size = out.values.shape
    if num_rows:
        size_padded = triton.next_power_of_2(size)
        _quantize_rows_kernel[(num_rows,)](
            x, x if rows is None else rows, row_parts, out.values, out.scales,
            x.stride(0), out.values.stride(0), row_parts.stride(0),
            HAS_ROWS=rows is not None, SIZE=size, SIZE_PADDED=size_padded, LARGEST=largest_of(out.values),
            ROUNDS_FIRST=is_interpreted(), num_warps=min(max(size_padded // 512, 1), 16), enable_fp_fusion=True,
        )  # fmt: skip


def quantized_swiglu(gate_up: torch.Tensor, out: ScaledRows) -> None:
    """Quantises silu(gate) * up into out, T rows of n; gate_up is ``[T, 2 n]``, gate beside up."""
    num_rows, size = out.values.shape
    if num_rows:
        size_padded = triton.next_power_of_2(size)
        _quantized_swiglu_kernel[(num_rows,)](
            gate_up, out.values, out.scales, gate_up.stride(0), out.values.stride(0),
            SIZE=size, SIZE_PADDED=size_padded, LARGEST=largest_of(out.values),
            ROUNDS_FIRST=is_interpreted(), num_warps=min(max(size_padded // 2048, 1), 16), enable_fp_fusion=True,
        )  # fmt: skip
