# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# Device code has no Python types: Triton infers them at the launch.
"""Random draws of tokens on a GPU, without sorting: one program per row.

A program reads its row of logits twice: first for the maximum, then for the total weight of each block. The random
number selects a block, which is read again to select the token.

Top-k and top-p keep the tokens whose logit is above a *cut*, and those with the lowest ids among the logits equal to
it. The cut is found among *candidates*, the logits that a first bound does not exclude: usually few, but most of the
row if its logits are similar. They are copied to scratch memory, where a binary search reads them up to 32 times. For
this, top-k reads the row once more, and top-p twice, as it needs the weight of all tokens first.

A logit's index in its block is its *lane*. Values gathered along a row are stored by lane, so that threads rarely wait
for each other: the maximum of each lane, its *peak*, and its candidates.
"""

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Logits that a program has in registers at the same time."""


@triton.jit
def _load(row, first, size, BLOCK: tl.constexpr):
    """Logits ``[BLOCK]`` starting at `first`, -inf after the last one."""
    ids = first + tl.arange(0, BLOCK)
    return tl.load(row + ids, mask=ids < size, other=-float("inf"))


@triton.jit
def _weigh(x, largest, scale):
    """Unnormalised probabilities."""
    return tl.exp2((x - largest) * scale)


@triton.jit
def _key_of(x):
    """Maps float32 to int64 so that keys have the order of the numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _number_of(key):
    """The inverse of `_key_of`."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _search(lanes, lengths, lowest, largest, scale, limit, tolerance, IS_COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Binary search for the highest number x such that the logits >= x reach `limit`, in count or in weight.

    Returns x and the count or weight of the logits above it. x is `lowest` if all logits above that do not reach the
    limit. The key of x may be too low by `tolerance`.
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
    """`_search` among the logits whose weight is more than `least`; `scratch` begins with the peaks."""
    candidates = scratch + BLOCK
    # Peaks are a subset of the logits: where peaks reach the limit, the logits do. A tolerance of 2**14 is at most
    # 0.2 % of a number, and saves 14 of 32 passes.
    ones = tl.full([BLOCK], 1, dtype=tl.int32)
    bound, _ = _search(scratch, ones, lowest, largest, scale, limit, 1 << 14, IS_COUNT, BLOCK)
    lengths = tl.zeros([BLOCK], dtype=tl.int32)
    tl.debug_barrier()  # all threads have read the candidates of an earlier search
    for first in range(0, vocab_size, BLOCK):
        x = _load(logits, first, vocab_size, BLOCK)
        is_candidate = (x >= bound) & (_weigh(x, largest, scale) > least)
        tl.store(candidates + lengths * BLOCK + tl.arange(0, BLOCK), x, mask=is_candidate)
        lengths += is_candidate.to(tl.int32)
    tl.debug_barrier()
    return _search(candidates, lengths, bound, largest, scale, limit, 0, IS_COUNT, BLOCK)


@triton.jit
def _sum_blocks(logits, vocab_size, largest, scale, cut, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr):
    """For each block, the weight above a cut, float32, and the number of tokens equal to it: int32 ``[NUM_BLOCKS]``."""
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
    num_kept = tl.zeros([], dtype=tl.float64)  # how many of the tokens equal to the cut are kept
    if top_k < vocab_size:
        cut, num_above = _find_cut(logits, vocab_size, scratch, cut, largest, scale, 0.0, top_k, True, BLOCK)
        num_kept = top_k - num_above
    if top_p < 1:
        above, _ = _sum_blocks(logits, vocab_size, largest, scale, cut, BLOCK, NUM_BLOCKS)
        total = tl.sum(above.to(tl.float64), 0) + num_kept * _weigh(cut, largest, scale)
        limit = top_p * total
        # The tokens up to this weight have less than 1 - top_p of the total weight, so top-p keeps none of them.
        least = ((1 - top_p) * total / vocab_size).to(tl.float32)
        likely, likely_above = _find_cut(logits, vocab_size, scratch, cut, largest, scale, least, limit, False, BLOCK)
        # At least one token is kept, even if a sum is rounded down to the limit or its tokens' weight to 0.
        tie = tl.maximum(_weigh(likely, largest, scale).to(tl.float64), 1e-300)
        wanted = tl.maximum(tl.ceil((limit - likely_above) / tie), 1.0)
        num_kept = tl.where(likely == cut, tl.minimum(wanted, num_kept), wanted)
        cut = likely
    above, num_ties = _sum_blocks(logits, vocab_size, largest, scale, cut, BLOCK, NUM_BLOCKS)
    ties_before = tl.cumsum(num_ties, 0) - num_ties
    num_kept_ties = tl.minimum(tl.maximum(num_kept - ties_before, 0.0), num_ties)
    sums = above.to(tl.float64) + num_kept_ties * _weigh(cut, largest, scale)
    wanted_weight = uniform * tl.sum(sums, 0)
    # If a sum is too small by rounding, the last block with a weight is used, or the last token of a block.
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
    """See `engine.kernels.draw.draw_tokens`; needs scratch memory of the logits' size."""
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    scratch = torch.empty(num_rows, (1 + num_blocks) * BLOCK, dtype=torch.float32, device=logits.device)
    logits, settings = logits.contiguous(), settings.contiguous()
    _draw_kernel[(num_rows,)](
        logits, settings, scratch, out, vocab_size, logits.stride(0), scratch.stride(0),
        BLOCK=BLOCK, NUM_BLOCKS=triton.next_power_of_2(num_blocks), num_warps=8,
    )  # fmt: skip
    return out
