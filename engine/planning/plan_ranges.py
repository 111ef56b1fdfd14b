"""The plan of a batch that is larger than memory: of one range of the sorted prompts after the other.

Prompts in the order of the prefix tree share beginnings with their neighbours only. So the batch can be planned in
consecutive ranges: whatever lies inside one is planned as `plan_token_table` plans the whole, and what is lost are the
prefixes in the beginning that two ranges have in common, once for each cut. A cut is made where that is shortest.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from engine.planning.plan import PlanMethod, PlanTable, plan_prompts
from engine.planning.prefix_tree import TokenArray, common_prefix_len

RANGE_TOKENS = 32_000_000
"""Tokens of a range: 128 MB, held about four times while they are planned."""

ROW_TOKENS = 64
"""What a row counts for besides its tokens, so that short prompts do not make ranges of millions of rows."""

WINDOW_SHARE = 0.25
"""Of a range, at its end: where its cut is looked for."""

Label = TypeVar("Label")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanRange(Generic[Label]):
    """Some consecutive prompts of the sorted batch, and their plan.

    Attributes:
        labels: of the rows, as they came.
        prompts: int32 arrays ``[num_tokens]``, one a row.
        table: of these rows alone; group ids count from 0.
        num_repeated_tokens: leading tokens of the first prompt that the last one of the range before has, too, and that
            the best sharing of the whole batch would compute once.
    """

    labels: Sequence[Label]
    prompts: Sequence[TokenArray]
    table: PlanTable
    num_repeated_tokens: int


def plan_ranges(
    rows: Iterable[tuple[Label, TokenArray]], *, method: PlanMethod = "exact", range_tokens: int = RANGE_TOKENS
) -> Iterator[PlanRange[Label]]:
    """Plans sorted prompts range by range; one range where all fit.

    Args:
        rows: a label of any kind and the token ids of each prompt, in the byte order of the token ids (`PrefixTree`).
        range_tokens: the most that a range holds, `ROW_TOKENS` for each row included; a longer prompt is one alone.
    """
    last: TokenArray | None = None
    for part in _cut_ranges(rows, range_tokens):
        prompts = [prompt for _, prompt in part]
        yield PlanRange(
            labels=[label for label, _ in part],
            prompts=prompts,
            table=plan_prompts(prompts, method=method),
            num_repeated_tokens=0 if last is None else _num_shared_tokens(last, prompts[0]),
        )
        last = prompts[-1]


def _cut_ranges(
    rows: Iterable[tuple[Label, TokenArray]], range_tokens: int
) -> Iterator[list[tuple[Label, TokenArray]]]:
    pending: list[tuple[Label, TokenArray]] = []
    sizes: list[int] = []
    num_pending = 0
    for row in rows:
        size = len(row[1]) + ROW_TOKENS
        if pending and num_pending + size > range_tokens:
            end = _find_cut([prompt for _, prompt in pending], row[1], sizes)
            yield pending[:end]
            num_pending -= sum(sizes[:end])
            pending, sizes = pending[end:], sizes[end:]
        pending.append(row)
        sizes.append(size)
        num_pending += size
    if pending:
        yield pending


def _find_cut(prompts: Sequence[TokenArray], following: TokenArray, sizes: Sequence[int]) -> int:
    """Prompts of the range: up to the shortest common beginning of neighbours in the window; of equal ones the last."""
    right, end, shortest = following, len(prompts), len(following) + 1
    num_left, num_window = 0, WINDOW_SHARE * sum(sizes)
    for position in range(len(prompts), 0, -1):
        left = prompts[position - 1]
        common = common_prefix_len(left, right)
        if common < shortest:
            end, shortest = position, common
        num_left += sizes[position - 1]
        if shortest == 0 or num_left > num_window:
            break
        right = left
    return end


def _num_shared_tokens(left: TokenArray, right: TokenArray) -> int:
    """Tokens of `right` that the prefix tree of both holds only once."""
    common = common_prefix_len(left, right)
    return common if common == len(left) == len(right) else min(common, len(left) - 1, len(right) - 1)
