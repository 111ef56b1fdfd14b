# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# Device code has no Python types: Triton infers them at the launch.
"""Prefix-shared attention of a whole token batch in one launch (BatchLLM section 4.4), merge included.

    out[t] = sum_j softmax_j(scale * q[t] . k[j]) v[j],  j over the positions up to t's own, its group's prefix first

Each program computes one tile of the work list (work_list.py) for one KV head. Prefix tiles, own tiles and paged tiles,
of the narrow or the wide shape, run in the same launch, so that there is only one tail. A tile that is only a part of
its rows' attention writes a partial result (fp32, lse base 2) and increments a counter per row. The program that
increments a row's counter to its number of parts merges them, and resets the counter to 0 for the next layer. No
program waits for another. Parts are merged in a fixed order, so that the result does not depend on timing.

Grid: one program per tile and KV head; the heads of a tile are adjacent, since a KV block has them side by side.
Layouts: query and out ``[T, num_q_heads, head_dim]``; caches ``[num_blocks, block_size, num_kv_heads, head_dim]``; the
rest as in DeviceWork. Addresses are 64-bit.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.scoring import Scoring
from engine.kernels.triton.device_work import DeviceWork
from engine.kernels.triton.layers.fp8 import FP8_DTYPES, is_interpreted, kv_scales, kv_strides
from engine.kernels.triton.merge import merge_rows, sink_scores
from engine.kernels.triton.tile import (
    FIRST_PART,
    IS_WIDE,
    NUM_PARTS,
    NUM_TOKENS,
    PART,
    POSITION_AT,
    ROW_WIDTH,
    TILE_WIDTH,
    attend_tile,
    packed_rows,
)

LOG2_E = 1.4426950408889634

Caches = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, ``[num_blocks, block_size, num_kv_heads, head_dim]`` each, with the same strides."""


@triton.jit
def _finish_stores(IS_AMD: tl.constexpr):
    """Barrier after which the program's stores are visible to a program that acquires what this one then releases.

    PTX's barrier orders the stores of all threads before a later release by any of them. AMD's release waits only for
    the stores of its own wave, and AMD's barrier for none, so each wave waits for its own stores here.
    """
    if IS_AMD:
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\n\tv_mov_b32 $0, 0", "=v,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()


@triton.jit
def _run_tile(
    out, query, key_cache, value_cache, tile, row_ids, rows, block_table, partial_out, partial_lse, counters,
    sinks, kv_head, scale, cap, window,
    stride_out_row, stride_out_head, stride_query_row, stride_query_head, stride_block, stride_token, stride_head,
    NUM_KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SPLIT_LOOP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SCALES: tl.constexpr,
    WIDENS_DOT: tl.constexpr, IS_MERGING: tl.constexpr, IS_AMD: tl.constexpr,
):  # fmt: skip
    # The loop of a wide tile, and a window, leave no registers for what is needed after it; on AMD they cost programs.
    IS_KEPT: tl.constexpr = not (SPLIT_LOOP or HAS_WINDOW or IS_AMD)
    row, group_head, is_row = packed_rows(tile, row_ids, GROUP_SIZE, M, not IS_KEPT)
    head = (kv_head * GROUP_SIZE + group_head).to(tl.int64)
    first_element = kv_head.to(tl.int64) * stride_head
    fields = rows + row * ROW_WIDTH
    position_fields = fields + tl.load(tile + POSITION_AT)
    if IS_KEPT:
        part = tl.load(tile + PART)
        first_part = tl.load(fields + FIRST_PART)
        num_parts = tl.load(fields + NUM_PARTS)
    key_scales = key_cache
    value_scales = value_cache
    if HAS_SCALES:
        key_scales = kv_scales(key_cache, kv_head, HEAD_DIM, NUM_KV_HEADS, BLOCK_SIZE)
        value_scales = kv_scales(value_cache, kv_head, HEAD_DIM, NUM_KV_HEADS, BLOCK_SIZE)
    result, lse = attend_tile(
        tile, query + row.to(tl.int64) * stride_query_row + head * stride_query_head,
        tl.load(position_fields + 1), tl.load(position_fields),
        key_cache + first_element, value_cache + first_element, key_scales, value_scales,
        block_table, scale, cap, window, stride_block, stride_token,
        HEAD_DIM, HEAD_DIM_PADDED, BLOCK_SIZE, M, N, SPLIT_LOOP, HAS_WINDOW, HAS_CAP, HAS_SCALES, WIDENS_DOT,
    )  # fmt: skip
    if not IS_KEPT:
        row, group_head, is_row = packed_rows(tile, row_ids, GROUP_SIZE, M, True)
        head = (kv_head * GROUP_SIZE + group_head).to(tl.int64)
        fields = rows + row * ROW_WIDTH
    dim = tl.arange(0, HEAD_DIM_PADDED)
    is_element = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    out_rows = out + row.to(tl.int64) * stride_out_row + head * stride_out_head
    if not IS_KEPT:
        part = tl.load(tile + PART)
    if part < 0:
        if HAS_SINKS:  # the tile is all of its rows' attention: the sink takes its share of the weights
            result *= (1.0 / (1.0 + tl.exp2(sink_scores(sinks, head) - lse)))[:, None]
        tl.store(out_rows[:, None] + dim[None, :], result, mask=is_element)
    else:
        NUM_Q_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP_SIZE
        if not IS_KEPT:
            first_part = tl.load(fields + FIRST_PART)
        where = (first_part + part).to(tl.int64) * NUM_Q_HEADS + head
        tl.store(partial_lse + where, lse, mask=is_row)
        tl.store(partial_out + where[:, None] * HEAD_DIM + dim[None, :], result, mask=is_element)
        if IS_MERGING:
            if not IS_KEPT:
                num_parts = tl.load(fields + NUM_PARTS)
            counter = counters + row.to(tl.int64) * NUM_Q_HEADS + head
            _finish_stores(IS_AMD)
            arrived = tl.atomic_add(counter, 1, mask=is_row, sem="acq_rel", scope="gpu")
            is_last = is_row & (arrived == num_parts - 1)
            tl.store(counter, tl.zeros([M], dtype=tl.int32), mask=is_last)
            # After this barrier all threads see what the threads of the atomic have acquired.
            tl.debug_barrier()
            merge_rows(
                out_rows, partial_out, partial_lse, first_part, num_parts, head, is_last, sinks,
                NUM_Q_HEADS, HEAD_DIM, M, HAS_SINKS,
            )  # fmt: skip


@triton.jit
def _attention_kernel(
    out, query, key_cache, value_cache, work, partial_out, partial_lse, counters,
    sinks, row_ids_at, rows_at, block_table_at, scale, cap, window,
    stride_out_row, stride_out_head, stride_query_row, stride_query_head, stride_block, stride_token, stride_head,
    NUM_KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NARROW_M: tl.constexpr, NARROW_N: tl.constexpr, WIDE_M: tl.constexpr, WIDE_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SCALES: tl.constexpr,
    WIDENS_DOT: tl.constexpr, IS_MERGING: tl.constexpr, IS_AMD: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    kv_head = program % NUM_KV_HEADS
    tile = work + program // NUM_KV_HEADS * TILE_WIDTH
    if tl.load(tile + NUM_TOKENS) > 0:
        is_wide = False
        if WIDE_M > 0:
            is_wide = tl.load(tile + IS_WIDE) != 0
        if WIDE_M > 0 and is_wide:
            _run_tile(
                out, query, key_cache, value_cache, tile, work + row_ids_at, work + rows_at, work + block_table_at,
                partial_out, partial_lse, counters, sinks, kv_head, scale, cap, window,
                stride_out_row, stride_out_head, stride_query_row, stride_query_head,
                stride_block, stride_token, stride_head,
                NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM, HEAD_DIM_PADDED, BLOCK_SIZE, WIDE_M, WIDE_N, True,
                HAS_WINDOW, HAS_CAP, HAS_SINKS, HAS_SCALES, WIDENS_DOT, IS_MERGING, IS_AMD,
            )  # fmt: skip
        else:
            _run_tile(
                out, query, key_cache, value_cache, tile, work + row_ids_at, work + rows_at, work + block_table_at,
                partial_out, partial_lse, counters, sinks, kv_head, scale, cap, window,
                stride_out_row, stride_out_head, stride_query_row, stride_query_head,
                stride_block, stride_token, stride_head,
                NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM, HEAD_DIM_PADDED, BLOCK_SIZE, NARROW_M, NARROW_N, False,
                HAS_WINDOW, HAS_CAP, HAS_SINKS, HAS_SCALES, WIDENS_DOT, IS_MERGING, IS_AMD,
            )  # fmt: skip


def launch_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    caches: Caches,
    work: DeviceWork,
    scoring: Scoring,
    *,
    first_tile: int,
    num_tiles: int,
    is_merging: bool,
) -> None:
    """Launches tiles [first_tile, first_tile + num_tiles) of a step; `attend` has checked the arguments.

    Args:
        out, query: ``[T, num_q_heads, head_dim]``.
        work: the step's tiles on the device; its partial results and counters are written.
        first_tile: a multiple of 4 (64 bytes).
        is_merging: whether the launch merges the partial results of a row into `out`.
    """
    _, num_q_heads, head_dim = query.shape
    key_cache, value_cache = caches
    block_size, num_kv_heads = key_cache.shape[1:3]
    launch, cap = work.launch, scoring.softcap
    skipped = first_tile * int(TILE_WIDTH.value)
    _attention_kernel[(num_tiles * num_kv_heads,)](
        out, query, key_cache, value_cache, work.work[skipped:], work.partial_out, work.partial_lse, work.counters,
        work.partial_lse if scoring.sinks is None else scoring.sinks,
        work.row_ids_at - skipped, work.rows_at - skipped, work.block_table_at - skipped,
        2 * LOG2_E * scoring.scale / cap if cap else LOG2_E * scoring.scale, LOG2_E * cap, scoring.window,
        *out.stride()[:2], *query.stride()[:2], *kv_strides(key_cache),
        NUM_KV_HEADS=num_kv_heads, GROUP_SIZE=num_q_heads // num_kv_heads,
        HEAD_DIM=head_dim, HEAD_DIM_PADDED=triton.next_power_of_2(max(head_dim, 16)), BLOCK_SIZE=block_size,
        NARROW_M=launch.narrow.rows, NARROW_N=launch.narrow.tokens,
        WIDE_M=launch.wide.rows if launch.wide else 0, WIDE_N=launch.wide.tokens if launch.wide else 0,
        HAS_WINDOW=scoring.window > 0, HAS_CAP=cap > 0, HAS_SINKS=scoring.sinks is not None,
        HAS_SCALES=key_cache.dtype in FP8_DTYPES,
        WIDENS_DOT=is_interpreted() and query.dtype == torch.bfloat16, IS_MERGING=is_merging,
        IS_AMD=query.is_cuda and torch.version.hip is not None,
        num_warps=launch.num_warps, num_stages=launch.num_stages, enable_fp_fusion=True, **launch.options,
    )  # fmt: skip
