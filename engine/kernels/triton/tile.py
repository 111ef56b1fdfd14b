# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# Device code has no Python types: Triton infers them at the launch.
"""Device code of one tile: packed query rows against a range of paged KV, with online softmax.

A tile is M packed rows by a range of KV positions. The query heads of one KV head are packed into the rows: packed row
r is query head r % GROUP_SIZE of the tile's token r // GROUP_SIZE. So the query heads of GQA and the members of a
prefix group fill the rows of one matrix product, and KV is read once for all of them.

Positions [0, prefix_len) are in the prefix's block table, later ones in the sequence's own. A prefix tile covers
positions of the first, an own tile of the second, a paged tile of both. A packed tile covers the own KV of several
sequences, block after block, with positions of its own. The visibility rule is the same for all: a row sees the
positions from its first one to its own, and with a sliding window only the last `window` of them. So a row sees its
whole prefix, its own KV causally, and no KV of other sequences.

An entry of a block table is a block id and, in the lowest SLOT_BITS, the last slot of the block that may be read.

Scores, sums and partial results are computed in fp32. Log-sum-exps are base 2 and of the *scaled* scores.
"""

import triton
import triton.language as tl

from engine.kernels.triton.tile_jobs import SLOT_BITS
from engine.kernels.triton.work_list import RowField, TileField

FIRST_ROW_ID = tl.constexpr(int(TileField.FIRST_ROW_ID))
NUM_TOKENS = tl.constexpr(int(TileField.NUM_TOKENS))
IS_WIDE = tl.constexpr(int(TileField.IS_WIDE))
KV_BEGIN = tl.constexpr(int(TileField.KV_BEGIN))
KV_END = tl.constexpr(int(TileField.KV_END))
PREFIX_LEN = tl.constexpr(int(TileField.PREFIX_LEN))
PREFIX_ENTRY = tl.constexpr(int(TileField.PREFIX_ENTRY))  # OWN_ENTRY is the next field
PART = tl.constexpr(int(TileField.PART))
POSITION_AT = tl.constexpr(int(TileField.POSITION_AT))
TILE_WIDTH = tl.constexpr(int(TileField.WIDTH))
FIRST_PART = tl.constexpr(int(RowField.FIRST_PART))
NUM_PARTS = tl.constexpr(int(RowField.NUM_PARTS))
ROW_WIDTH = tl.constexpr(int(RowField.WIDTH))
SHIFT = tl.constexpr(SLOT_BITS)
SLOT_MASK = tl.constexpr((1 << SLOT_BITS) - 1)


@triton.jit
def packed_rows(tile, row_ids, GROUP_SIZE: tl.constexpr, M: tl.constexpr, IS_TWICE: tl.constexpr):
    """The tile's packed rows ``[M]``: the row of the batch, the query head within the KV head, and whether it exists.

    Rows beyond the tile's tokens repeat its last token, so that every load is valid; they are not stored.

    IS_TWICE: they are computed before and after the tile's loop, so that they need no registers in it. The loads are
    volatile, since the compiler would keep the values else; such loads go to L2.
    """
    packed = tl.arange(0, M)
    token = packed // GROUP_SIZE
    # M need not be a multiple of GROUP_SIZE: the work list gives a tile at most M // GROUP_SIZE tokens.
    num_tokens = tl.load(tile + NUM_TOKENS, volatile=IS_TWICE)
    first_row_id = tl.load(tile + FIRST_ROW_ID, volatile=IS_TWICE)
    row = tl.load(row_ids + first_row_id + tl.minimum(token, num_tokens - 1))
    return row, packed % GROUP_SIZE, token < num_tokens


@triton.jit
def _entries(block_table, start, last, BLOCK_SIZE: tl.constexpr, N: tl.constexpr):
    """Block table entries of tokens start..start + N - 1, up to last: ``[N]``, a scalar if N divides BLOCK_SIZE."""
    token = start if BLOCK_SIZE % N == 0 else start + tl.arange(0, N)
    return tl.load(block_table + tl.minimum(token, last) // BLOCK_SIZE)


@triton.jit
def _widened(values, dtype: tl.constexpr):
    """Values in the format of queries; exact. NVIDIA's 8-bit format goes by way of fp32, since the compiler would take
    fp16, which is converted to bf16 at a quarter of the rate."""
    return values.to(tl.float32).to(dtype) if values.dtype == tl.float8e4nv else values.to(dtype)


@triton.jit
def _attend_range(
    acc, top, total, query, key_head, value_head, key_scales, value_scales, block_table,
    begin, end, last, first_position, first_seen, positions, scale, cap, stride_block, stride_token,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, N: tl.constexpr, IS_MASKED: tl.constexpr,
    MAY_BE_PACKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SCALES: tl.constexpr,
    WIDENS_DOT: tl.constexpr,
):  # fmt: skip
    """Online softmax over tokens [begin, end) of one block table; no token after `last` is read.

    first_position is the position of the table's token 0. A row sees positions first_seen to positions, both ``[M]``.
    begin is a multiple of N if N divides BLOCK_SIZE; end - begin is a multiple of N unless IS_MASKED. Loads are not
    masked by token: in place of tokens after `last`, or after a block's last slot, that token is read again, and its
    score is masked. So slots that were never written, which may hold NaN, are never read.
    """
    HEAD_DIM_PADDED: tl.constexpr = query.shape[1]
    dim = tl.arange(0, HEAD_DIM_PADDED)
    is_dim = (dim < HEAD_DIM)[None, :]
    lane = tl.arange(0, N)
    # Loaded one iteration ahead, so that KV loads do not wait for the block table.
    entries = _entries(block_table, begin, last, BLOCK_SIZE, N)
    for start in range(begin, end, N):
        token = start + lane
        slot = token % BLOCK_SIZE
        if IS_MASKED:
            slot = tl.minimum(token, last) % BLOCK_SIZE
        if MAY_BE_PACKED:
            slot = tl.minimum(slot, entries & SLOT_MASK)
        ids = entries >> SHIFT
        if HAS_SCALES:
            scale_at = ids.to(tl.int64) * (stride_block // 2) + slot
        where = (ids.to(tl.int64) * stride_block + slot * stride_token)[:, None] + dim[None, :]
        entries = _entries(block_table, start + N, last, BLOCK_SIZE, N)
        if HEAD_DIM == HEAD_DIM_PADDED:
            key = tl.load(key_head + where)
        else:
            key = tl.load(key_head + where, mask=is_dim, other=0.0)
        if WIDENS_DOT:
            key = key.to(tl.float32)
        scores = tl.dot(query, tl.trans(_widened(key, query.dtype)), input_precision="ieee") * scale
        if HAS_SCALES:
            scores *= tl.load(key_scales + scale_at).to(tl.float32)[None, :]
        if HAS_CAP:
            # cap * tanh(x), where scores are 2 * log2(e) * x by the choice of scale.
            # At the bound tanh is 1 and exp2 does not overflow.
            scores = cap - 2.0 * cap / (1.0 + tl.exp2(tl.minimum(scores, 126.0)))
        if IS_MASKED:
            # Tokens after `last` get a position after any row, so that one comparison masks both.
            position = tl.where(token <= last, first_position + token, 2147483647)
            is_visible = position[None, :] <= positions[:, None]
            if MAY_BE_PACKED or HAS_WINDOW:
                is_visible = is_visible & (position[None, :] >= first_seen[:, None])
            scores = tl.where(is_visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row may have seen no token yet: avoid -inf - -inf.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top) if IS_MASKED else new_top
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        if HEAD_DIM == HEAD_DIM_PADDED:
            value = tl.load(value_head + where)
        else:
            value = tl.load(value_head + where, mask=is_dim, other=0.0)
        if HAS_SCALES:
            weights *= tl.load(value_scales + scale_at).to(tl.float32)[None, :]
            weights, value = weights.to(query.dtype), _widened(value, query.dtype)
        else:
            weights = weights.to(value.dtype)
        if WIDENS_DOT:
            weights, value = weights.to(tl.float32), value.to(tl.float32)
        acc = tl.dot(weights, value, acc, input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit
def attend_tile(
    tile, query_rows, first_seen, positions, key_head, value_head, key_scales, value_scales, block_table,
    scale, cap, window, stride_block, stride_token,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SPLIT_LOOP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SCALES: tl.constexpr,
    WIDENS_DOT: tl.constexpr,
):  # fmt: skip
    """Attention of one tile.

    Args:
        query_rows: pointers ``[M]`` to the packed rows' first element.
        first_seen, positions: int32 ``[M]``, the first and the last position that each row sees.
        scale: of the scores: softmax scale * log2(e); with a soft cap 2 * log2(e) * softmax scale / soft cap.
        cap: soft cap * log2(e).
        key_scales, value_scales: with HAS_SCALES, pointers to the head's scales (fp8.py) of slot 0 in block 0.
        WIDENS_DOT: multiply in fp32, because Triton's interpreter would multiply bfloat16's bit patterns.
        SPLIT_LOOP: process the KV that every row sees in a loop without masks, which pays where arithmetic is the
            bottleneck; such a tile is never packed.
    Returns:
        out fp32 ``[M, HEAD_DIM_PADDED]``, normalised, 0 for a row that sees no token; lse base 2 ``[M]``, -inf for
        such a row.
    """
    dim = tl.arange(0, HEAD_DIM_PADDED)
    if HEAD_DIM == HEAD_DIM_PADDED:
        query = tl.load(query_rows[:, None] + dim[None, :])
    else:
        query = tl.load(query_rows[:, None] + dim[None, :], mask=(dim < HEAD_DIM)[None, :], other=0.0)
    if WIDENS_DOT:
        query = query.to(tl.float32)
    kv_begin = tl.load(tile + KV_BEGIN)
    kv_end = tl.load(tile + KV_END)
    prefix_len = tl.load(tile + PREFIX_LEN)
    first_row_position = tl.min(positions, 0)
    if HAS_WINDOW:
        first_seen = tl.maximum(first_seen, positions - window + 1)
    acc = tl.zeros([M, HEAD_DIM_PADDED], dtype=tl.float32)
    top = tl.full([M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    for segment in range(tl.where(kv_begin < prefix_len, 0, 1), tl.where(kv_end > prefix_len, 2, 1)):
        first_position = segment * prefix_len
        begin = tl.maximum(kv_begin - first_position, 0)
        end = tl.where(segment == 0, tl.minimum(kv_end, prefix_len), kv_end - prefix_len)
        table = block_table + tl.load(tile + PREFIX_ENTRY + segment)
        if HAS_WINDOW:
            # Skip tokens before every row's window, in multiples of N, so that steps stay aligned to blocks.
            begin += tl.maximum(tl.min(first_seen, 0) - first_position - begin, 0) // N * N
        if SPLIT_LOOP and not HAS_WINDOW:
            seen_by_all = tl.minimum(first_row_position + 1 - first_position, end)
            middle = begin + tl.maximum(seen_by_all - begin, 0) // N * N
            acc, top, total = _attend_range(
                acc, top, total, query, key_head, value_head, key_scales, value_scales, table, begin, middle, end - 1,
                first_position, first_seen, positions, scale, cap, stride_block, stride_token,
                HEAD_DIM, BLOCK_SIZE, N, False, False, HAS_WINDOW, HAS_CAP, HAS_SCALES, WIDENS_DOT,
            )  # fmt: skip
            begin = middle
        acc, top, total = _attend_range(
            acc, top, total, query, key_head, value_head, key_scales, value_scales, table, begin, end, end - 1,
            first_position, first_seen, positions, scale, cap, stride_block, stride_token,
            HEAD_DIM, BLOCK_SIZE, N, True, not SPLIT_LOOP, HAS_WINDOW, HAS_CAP, HAS_SCALES, WIDENS_DOT,
        )  # fmt: skip
    is_empty = total == 0.0
    out = acc / tl.where(is_empty, 1.0, total)[:, None]
    lse = tl.where(is_empty, float("-inf"), top + tl.log2(tl.where(is_empty, 1.0, total)))
    return out, lse
