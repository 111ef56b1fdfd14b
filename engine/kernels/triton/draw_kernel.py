# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# Device code has no Python types: Triton infers them at the launch.
"""Random draws of tokens on a GPU, without sorting: one program a row.

A program reads its row of logits twice: once for the largest, once for the weight of each block. The random number
points to a block, which is read again for the token.

What top-k and top-p leave is described by a *cut*: all tokens whose logit is above it, and of those that equal it the
ones with the lowest ids. The cut is found among *candidates*, logits that a first bound does not rule out: usually few,
but most of the row where that is flat. They are copied to scratch memory, where a binary search reads them up to 32
times. For that, top-k reads the row once more, and top-p twice, as it needs the weight of all tokens first.

A logit's place in its block is its *lane*. What is gathered along a row is kept by lane, so that threads seldom wait
for each other: the largest logit of each lane, its *peak*, and its candidates.
"""

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Logits that a program holds at once."""


@triton.jit
def _load(row, first, size, BLOCK: tl.constexpr):
    """Logits ``[BLOCK]`` from `first` on, -inf behind the last one."""
    ids = first + tl.arange(0, BLOCK)
    return tl.load(row + ids, mask=ids < size, other=-float("inf"))


@triton.jit
def _weigh(x, largest, scale):
    return tl.exp2((x - largest) * scale)


@triton.jit
def _key_of(x):
    """A whole number, int64: keys are in the order of the float32 numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _number_of(key):
    """The float32 number that has a key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _search(lanes, lengths, lowest, largest, scale, limit, tolerance, IS_COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The highest number such that what is not below it reaches `limit`, in tokens or in weight; and what is above it.

    Where all that is above `lowest` does not reach the limit, the number is `lowest`. Its key may be lower than that of
    the highest by `tolerance`.
    """
    low, high = _key_of(lowest), _key_of(largest)
    above = tl.zeros([], dtype=tl.float64)
    longest = tl.max(lengths, 0)
    while high - low > tolerance:
        middle = low + ((high - low + 1) >> 1)
        number = _number_of(middle)
        sums = tl.zeros([BLOCK], dtype=tl.float32)
        for depth in range(longest):
            x = tl.load(lanes + depth * BLOCK + tl.arange(0, BLOCK), mask=depth < lengths, other=-float("inf"))
            sums += tl.where(x >= number, 1.0 if IS_COUNT else _weigh(x, largest, scale), 0.0)
        total = tl.sum(sums, 0).to(tl.float64)
        is_reached = total >= limit
        above = tl.where(is_reached, above, total)
        low = tl.where(is_reached, middle, low)
        high = tl.where(is_reached, high, middle - 1)
    return _number_of(low), above


@triton.jit
def _find_cut(
    logits, vocab_size, scratch, lowest, largest, scale, least, limit, IS_COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """What `_search` finds among the logits that weigh more than `least`; `scratch` begins with the peaks."""
    candidates = scratch + BLOCK
    # Peaks are some of the logits: where they reach the limit, all of them do. A tolerance of 2**14 is at most
    # 0.2 % of a number, and spares 14 passes of 32.
    ones = tl.full([BLOCK], 1, dtype=tl.int32)
    bound, _ = _search(scratch, ones, lowest, largest, scale, limit, 1 << 14, IS_COUNT, BLOCK)
    lengths = tl.zeros([BLOCK], dtype=tl.int32)
    tl.debug_barrier()  # until all threads are through with the candidates of an earlier search
    for first in range(0, vocab_size, BLOCK):
        x = _load(logits, first, vocab_size, BLOCK)
        is_candidate = (x >= bound) & (_weigh(x, largest, scale) > least)
        tl.store(candidates + lengths * BLOCK + tl.arange(0, BLOCK), x, mask=is_candidate)
        lengths += is_candidate.to(tl.int32)
    tl.debug_barrier()
    return _search(candidates, lengths, bound, largest, scale, limit, 0, IS_COUNT, BLOCK)


@triton.jit
def _sum_blocks(logits, vocab_size, largest, scale, cut, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr):
    """The weight above a cut, float32, and the number of tokens at it, int32, of each block: ``[NUM_BLOCKS]``."""
    blocks = tl.arange(0, NUM_BLOCKS)
    above = tl.zeros([NUM_BLOCKS], dtype=tl.float32)
    num_ties = tl.zeros([NUM_BLOCKS], dtype=tl.int32)
    for block in range(tl.cdiv(vocab_size, BLOCK)):
        x = _load(logits, block * BLOCK, vocab_size, BLOCK)
        weight = tl.sum(tl.where(x > cut, _weigh(x, largest, scale), 0.0), 0)
        above = tl.where(blocks == block, weight, above)
        num_ties = tl.where(blocks == block, tl.sum((x == cut).to(tl.int32), 0), num_ties)
    return above, num_ties


@triton.jit
def _draw_kernel(
    logits, settings, scratch, out, vocab_size, stride_row, stride_scratch,
    BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride_row
    scratch += row * stride_scratch
    temperature = tl.load(settings + row * 4)
    top_k = tl.load(settings + row * 4 + 1)
    top_p = tl.load(settings + row * 4 + 2)
    uniform = tl.load(settings + row * 4 + 3)
    scale = tl.minimum(1.4426950408889634 / temperature, 1e30).to(tl.float32)
    peaks = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    for first in range(0, vocab_size, BLOCK):
        peaks = tl.maximum(peaks, _load(logits, first, vocab_size, BLOCK))
    largest = tl.max(peaks, 0)
    tl.store(scratch + tl.arange(0, BLOCK), peaks)
    tl.debug_barrier()
    cut = tl.full([], -float("inf"), dtype=tl.float32)
    num_kept = tl.zeros([], dtype=tl.float64)  # of the tokens at the cut
    if top_k < vocab_size:
        cut, num_above = _find_cut(logits, vocab_size, scratch, cut, largest, scale, 0.0, top_k, True, BLOCK)
        num_kept = top_k - num_above
    if top_p < 1:
        above, _ = _sum_blocks(logits, vocab_size, largest, scale, cut, BLOCK, NUM_BLOCKS)
        total = tl.sum(above.to(tl.float64), 0) + num_kept * _weigh(cut, largest, scale)
        limit = top_p * total
        # All tokens that are not heavier have less than 1 - top_p of the weight together.
        least = ((1 - top_p) * total / vocab_size).to(tl.float32)
        likely, likely_above = _find_cut(logits, vocab_size, scratch, cut, largest, scale, least, limit, False, BLOCK)
        # Where a sum rounds down to the limit, or its tokens' weight to nothing, one token is left all the same.
        tie = tl.maximum(_weigh(likely, largest, scale).to(tl.float64), 1e-300)
        wanted = tl.maximum(tl.ceil((limit - likely_above) / tie), 1.0)
        num_kept = tl.where(likely == cut, tl.minimum(wanted, num_kept), wanted)
        cut = likely
    above, num_ties = _sum_blocks(logits, vocab_size, largest, scale, cut, BLOCK, NUM_BLOCKS)
    ties_before = tl.cumsum(num_ties, 0) - num_ties
    num_kept_ties = tl.minimum(tl.maximum(num_kept - ties_before, 0.0), num_ties)
    sums = above.to(tl.float64) + num_kept_ties * _weigh(cut, largest, scale)
    wanted_weight = uniform * tl.sum(sums, 0)
    # Where rounding leaves a sum short, the last block that has a weight is taken, and the last token of a block.
    blocks = tl.arange(0, NUM_BLOCKS)
    last_block = tl.max(tl.where(sums > 0, blocks, 0), 0)
    is_passed = (sums > 0) & (tl.cumsum(sums, 0) > wanted_weight)
    block = tl.min(tl.where(is_passed, blocks, last_block), 0)
    x = _load(logits, block * BLOCK, vocab_size, BLOCK)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    tie_numbers = tl.sum(tl.where(blocks < block, num_ties, 0), 0) + tl.cumsum((x == cut).to(tl.int32), 0)
    is_kept = (x > cut) | ((x == cut) & (tie_numbers <= num_kept))
    weights = tl.where(is_kept, _weigh(x, largest, scale), 0.0).to(tl.float64)
    weight_before = tl.sum(tl.where(blocks < block, sums, 0.0), 0)
    last_id = tl.max(tl.where(weights > 0, ids, 0), 0)
    is_passed = (weights > 0) & (weight_before + tl.cumsum(weights, 0) > wanted_weight)
    tl.store(out + row, tl.min(tl.where(is_passed, ids, last_id), 0).to(tl.int64))


def draw_tokens(logits: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
    """See `engine.kernels.draw.draw_tokens`; takes scratch memory of the logits' size."""
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    scratch = torch.empty(num_rows, (1 + num_blocks) * BLOCK, device=logits.device)
    logits, settings = logits.contiguous(), settings.contiguous()
    _draw_kernel[(num_rows,)](
        logits, settings, scratch, out, vocab_size, logits.stride(0), scratch.stride(0),
        BLOCK=BLOCK, NUM_BLOCKS=triton.next_power_of_2(num_blocks), num_warps=8,
    )  # fmt: skip
    return out
