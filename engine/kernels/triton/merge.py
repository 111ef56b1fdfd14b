# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# Device code has no Python types: Triton infers them at the launch.
"""The merge of partial results over disjoint KV by their log-sum-exps (RelayAttention Eq. 7, BatchLLM Eq. 1).

    out = sum_k 2^(lse_k - lse) out_k,   2^lse = sum_k 2^lse_k

in fp32, lse base 2, over any number of parts. Part k of a row has index first_part[row] + k in
partial_out ``[num_partials, num_q_heads, head_dim]`` and partial_lse ``[num_partials, num_q_heads]``, both fp32. Parts
are always merged in this order, so that a result does not depend on which program finished last.

In the fused launch the last program of a row calls `merge_rows`. Relay attention launches `merge_partials`, with one
program for every few (row, query head) pairs.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.triton.device_work import DeviceWork
from engine.kernels.triton.tile import FIRST_PART, NUM_PARTS, ROW_WIDTH


@triton.jit
def sink_scores(sinks, head):
    """The scores of the heads' sinks, base 2."""
    return tl.load(sinks + head).to(tl.float32) * 1.4426950408889634


@triton.jit
def merge_rows(
    out_rows, partial_out, partial_lse, first_part, num_parts, head, is_merged, sinks,
    NUM_Q_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, M: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Merges and stores the rows for which is_merged ``[M]`` is true.

    out_rows: pointers ``[M]`` to the rows' first element. first_part, num_parts, head (of all query heads): ``[M]``.
    A sink (`sink_scores`) is a part with a weight and an output of 0.

    Each read of partial results takes a trip to L2, so two parts are read at once. A few columns at a time, so that the
    merge does not need more registers than the tile before it.
    """
    COLUMNS: tl.constexpr = 64 if M <= 16 else 32
    most = tl.max(tl.where(is_merged, num_parts, 0), 0)
    if most > 0:
        for first_column in range(0, HEAD_DIM, COLUMNS):
            dim = first_column + tl.arange(0, COLUMNS)
            is_dim = (dim < HEAD_DIM)[None, :]
            acc = tl.zeros([M, COLUMNS], dtype=tl.float32)
            top = tl.full([M], float("-inf"), dtype=tl.float32)
            total = tl.zeros([M], dtype=tl.float32)
            if HAS_SINKS:
                top = sink_scores(sinks, head)
                total = tl.full([M], 1.0, dtype=tl.float32)
            for part in range(0, most, 2):
                lse, out = _read_part(
                    partial_out, partial_lse, first_part + part, head, is_merged & (part < num_parts), dim, is_dim,
                    NUM_Q_HEADS, HEAD_DIM,
                )  # fmt: skip
                next_lse, next_out = _read_part(
                    partial_out, partial_lse, first_part + part + 1, head, is_merged & (part + 1 < num_parts), dim,
                    is_dim, NUM_Q_HEADS, HEAD_DIM,
                )  # fmt: skip
                new_top = tl.maximum(top, tl.maximum(lse, next_lse))
                shift = tl.where(new_top == float("-inf"), 0.0, new_top)
                decay = tl.exp2(top - shift)
                weight = tl.exp2(lse - shift)
                next_weight = tl.exp2(next_lse - shift)
                acc = acc * decay[:, None] + out * weight[:, None] + next_out * next_weight[:, None]
                total = total * decay + weight + next_weight
                top = new_top
            acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(out_rows[:, None] + dim[None, :], acc, mask=is_merged[:, None] & is_dim)


@triton.jit
def _read_part(
    partial_out, partial_lse, index, head, is_read, dim, is_dim, NUM_Q_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """The log-sum-exp ``[M]`` of partial results and their columns `dim`; -inf and 0 where is_read ``[M]`` is false."""
    where = index.to(tl.int64) * NUM_Q_HEADS + head
    # .cg bypasses L1, which may have stale lines: other programs wrote these values in this launch.
    lse = tl.load(partial_lse + where, mask=is_read, other=float("-inf"), cache_modifier=".cg")
    out = tl.load(
        partial_out + where[:, None] * HEAD_DIM + dim[None, :], mask=is_read[:, None] & is_dim, other=0.0,
        cache_modifier=".cg",
    )  # fmt: skip
    return lse, out


@triton.jit
def _merge_kernel(
    out, partial_out, partial_lse, rows, sinks, num_pairs, stride_out_row, stride_out_head,
    NUM_Q_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, M: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    is_pair = pair < num_pairs
    row = pair // NUM_Q_HEADS
    head = pair % NUM_Q_HEADS
    first_part = tl.load(rows + row * ROW_WIDTH + FIRST_PART, mask=is_pair, other=0)
    num_parts = tl.load(rows + row * ROW_WIDTH + NUM_PARTS, mask=is_pair, other=0)
    # The tile of a row with one part has stored the result.
    merge_rows(
        out + row * stride_out_row + head * stride_out_head, partial_out, partial_lse, first_part, num_parts, head,
        num_parts > 1, sinks, NUM_Q_HEADS, HEAD_DIM, M, HAS_SINKS,
    )  # fmt: skip


def merge_partials(out: torch.Tensor, work: DeviceWork, sinks: torch.Tensor | None = None) -> None:
    """Merges the partial results of a step whose tiles have been computed into `out` ``[T, num_q_heads, head_dim]``;
    rows of one part are not changed. See `Scoring`."""
    num_rows, num_q_heads, head_dim = out.shape
    rows_a_program = 16
    _merge_kernel[(triton.cdiv(num_rows * num_q_heads, rows_a_program),)](
        out, work.partial_out, work.partial_lse, work.work[work.rows_at :],
        work.partial_lse if sinks is None else sinks, num_rows * num_q_heads, *out.stride()[:2],
        NUM_Q_HEADS=num_q_heads, HEAD_DIM=head_dim, M=rows_a_program, HAS_SINKS=sinks is not None,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
