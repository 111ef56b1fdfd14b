# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# Device code has no Python types: Triton infers them at the launch.
"""Random draws of tokens on a GPU, without sorting: one program a row, which reads its logits a few times.

What top-k and top-p leave is described by a *cut*: all tokens whose logit is above it, and of those that equal it the
ones with the lowest ids. The cut is found by narrowing its range eightfold with each pass over the row: eight
thresholds at once, of which each has the number, or the weight, of the tokens above it. Logits are compared as
whole numbers in the same order ("keys"), so that eleven passes end at a single one.
"""

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""Logits that a program holds at once."""

_NUM_THRESHOLDS = tl.constexpr(8)
_NUM_PASSES = tl.constexpr(11)  # of three bits each: keys have 32
_NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def _load_keys(logits, first, vocab_size, BLOCK: tl.constexpr):
    """Logits ``[BLOCK]`` from `first` on, their keys int64 (-1 behind the last one), and their ids."""
    ids = first + tl.arange(0, BLOCK)
    x = tl.load(logits + ids, mask=ids < vocab_size, other=-float("inf")) + 0.0  # -0 becomes 0
    bits = x.to(tl.int32, bitcast=True)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648
    return x, tl.where(ids < vocab_size, keys, -1), ids


@triton.jit
def _find_cut(logits, vocab_size, largest, scale, limit, IS_COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest key above which lies less than `limit`, in tokens or in weight, and how much lies above it."""
    base = tl.zeros([], dtype=tl.int64)
    step = tl.full([], 1 << 30, dtype=tl.int64)
    for _ in range(_NUM_PASSES):
        thresholds = base + (tl.arange(0, _NUM_THRESHOLDS).to(tl.int64) + 1) * step - 1
        above = tl.zeros([_NUM_THRESHOLDS], dtype=tl.float64)
        for first in range(0, vocab_size, BLOCK):
            x, keys, _ids = _load_keys(logits, first, vocab_size, BLOCK)
            measure = tl.full([BLOCK], 1.0, dtype=tl.float32) if IS_COUNT else tl.exp2((x - largest) * scale)
            found = tl.where(keys[:, None] > thresholds[None, :], measure[:, None], 0.0)
            above += tl.sum(found, 0).to(tl.float64)
        base += step * tl.sum((above >= limit).to(tl.int64), 0)
        step = step >> 3
    rest = tl.zeros([], dtype=tl.float64)
    for first in range(0, vocab_size, BLOCK):
        x, keys, _ids = _load_keys(logits, first, vocab_size, BLOCK)
        measure = tl.full([BLOCK], 1.0, dtype=tl.float32) if IS_COUNT else tl.exp2((x - largest) * scale)
        rest += tl.sum(tl.where(keys > base, measure, 0.0), 0).to(tl.float64)
    return base, rest


@triton.jit
def _weigh(logits, vocab_size, largest, scale, cut, BLOCK: tl.constexpr):
    """The weight above a cut, and that of one token at it."""
    above = tl.zeros([], dtype=tl.float64)
    tie = tl.zeros([], dtype=tl.float32)
    for first in range(0, vocab_size, BLOCK):
        x, keys, _ids = _load_keys(logits, first, vocab_size, BLOCK)
        weights = tl.exp2((x - largest) * scale)
        above += tl.sum(tl.where(keys > cut, weights, 0.0), 0).to(tl.float64)
        tie = tl.maximum(tie, tl.max(tl.where(keys == cut, weights, 0.0), 0))
    return above, tie.to(tl.float64)


@triton.jit
def _draw_kernel(logits, settings, out, vocab_size, stride_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride_row
    temperature = tl.load(settings + row * 4)
    top_k = tl.load(settings + row * 4 + 1)
    top_p = tl.load(settings + row * 4 + 2)
    uniform = tl.load(settings + row * 4 + 3)
    scale = tl.minimum(1.4426950408889634 / temperature, 1e30).to(tl.float32)
    largest = tl.full([], -float("inf"), dtype=tl.float32)
    for first in range(0, vocab_size, BLOCK):
        x, _keys, _ids = _load_keys(logits, first, vocab_size, BLOCK)
        largest = tl.maximum(largest, tl.max(x, 0))
    cut = tl.full([], -1, dtype=tl.int64)
    num_ties = tl.zeros([], dtype=tl.float64)  # kept of those at the cut
    if top_k < vocab_size:
        cut, num_above = _find_cut(logits, vocab_size, largest, scale, top_k, True, BLOCK)
        num_ties = top_k - num_above
    above, tie = _weigh(logits, vocab_size, largest, scale, cut, BLOCK)
    if top_p < 1:
        limit = top_p * (above + num_ties * tie)
        likely, likely_above = _find_cut(logits, vocab_size, largest, scale, limit, False, BLOCK)
        if likely >= cut:
            likely_above, likely_tie = _weigh(logits, vocab_size, largest, scale, likely, BLOCK)
            # Where a sum rounds down to the limit, or its tokens' weight to nothing, one token is left all the same.
            wanted = tl.maximum(tl.ceil((limit - likely_above) / tl.maximum(likely_tie, 1e-300)), 1.0)
            num_ties = tl.where(likely == cut, tl.minimum(wanted, num_ties), wanted)
            cut, above, tie = likely, likely_above, likely_tie
    ties_passed = tl.zeros([], dtype=tl.int32)
    drawn = tl.full([], _NO_ID, dtype=tl.int32)
    last = tl.zeros([], dtype=tl.int32)  # what is drawn where rounding leaves the sum short
    total = tl.zeros([], dtype=tl.float64)
    for is_second in range(2):  # the first time for the sum of what is kept, as the second one adds it up
        wanted_weight = uniform * total
        total = tl.zeros([], dtype=tl.float64)
        ties_passed = tl.zeros([], dtype=tl.int32)
        for first in range(0, vocab_size, BLOCK):
            x, keys, ids = _load_keys(logits, first, vocab_size, BLOCK)
            is_tie = (keys == cut).to(tl.int32)
            ties_before = ties_passed + tl.cumsum(is_tie, 0) - is_tie
            is_kept = (keys > cut) | ((keys == cut) & (ties_before.to(tl.float64) < num_ties))
            weights = tl.where(is_kept, tl.exp2((x - largest) * scale), 0.0).to(tl.float64)
            sums = total + tl.cumsum(weights, 0)
            if is_second == 1:
                drawn = tl.minimum(drawn, tl.min(tl.where(sums > wanted_weight, ids, _NO_ID), 0))
            last = tl.maximum(last, tl.max(tl.where(weights > 0, ids, 0), 0))
            total += tl.sum(weights, 0)
            ties_passed += tl.sum(is_tie, 0)
    tl.store(out + row, tl.where(drawn == _NO_ID, last, drawn).to(tl.int64))


def draw_tokens(logits: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
    """See `engine.kernels.draw.draw_tokens`."""
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    logits, settings = logits.contiguous(), settings.contiguous()
    _draw_kernel[(len(logits),)](logits, settings, out, logits.shape[1], logits.stride(0), BLOCK=BLOCK, num_warps=8)
    return out
