"""The arithmetic of the policies: who comes first, what a step is packed with, what an answer is expected to need."""

import random
from typing import Any

import pytest

from engine import EngineConfig, PrefixGroup, Request, plan_prefix_groups
from engine.scheduling.admission import OutputReserve
from engine.scheduling.policies.batching import admission_window_tokens
from engine.scheduling.policies.packing import pack_decreasing, pack_in_turn, pack_length_ordered, pack_padded
from engine.scheduling.policies.sharing import schedule_groups
from engine.scheduling.request_queues import order_groups
from engine.scheduling.sequence import Sequence


def pack_all(pack: object, lengths: list[int], budget: int) -> list[list[int]]:
    """Lengths by step, until nothing is left."""
    left, steps = list(lengths), []
    while left:
        taken = pack(left, budget)  # type: ignore[operator]
        steps.append([left[index] for index in taken])
        left = [length for index, length in enumerate(left) if index not in taken]
    return steps


def test_prompts_are_packed_into_steps() -> None:
    lengths = [5, 7, 2, 4, 12, 3, 1]
    assert pack_all(pack_in_turn, lengths, 10) == [[5], [7, 2], [4], [12], [3, 1]]
    assert pack_all(pack_decreasing, lengths, 10) == [[12], [7, 3], [5, 4], [2, 1]]
    assert pack_all(pack_padded, lengths, 10) == [[5], [7], [2, 4], [12], [3, 1]]
    assert pack_all(pack_length_ordered, lengths, 10) == [[12], [7], [5, 4], [3, 2, 1]]
    for pack in (pack_in_turn, pack_decreasing, pack_padded, pack_length_ordered):
        assert pack([], 10) == []


def test_bins_are_never_too_full_and_hardly_ever_more_than_needed() -> None:
    rng = random.Random(2)
    for _ in range(50):
        lengths = [rng.randrange(1, 60) for _ in range(40)]
        bins = pack_all(pack_decreasing, lengths, 100)
        assert sorted(length for bin_ in bins for length in bin_) == sorted(lengths)
        assert max(map(sum, bins)) <= 100
        assert [bin_[0] for bin_ in bins] == sorted((bin_[0] for bin_ in bins), reverse=True)
        assert len(bins) <= -(-sum(lengths) // 100) * 11 // 9 + 1  # the bound of packing the longest first


def three_groups() -> tuple[list[Request], list[PrefixGroup]]:
    """Requests 0 and 3 below a long document, 1 and 4 below a short one, 2 alone; 5 is 1 again, and urgent."""
    long, short = [1] * 40, [2] * 20
    prompts = [[*long, 50, 60], [*short, 51], [9, 9], [*long, 53], [*short, 54], [*short, 51]]
    estimates, priorities = [8, 3, 5, 30, 6, 3], [0, 1, 2, 0, 0, 7]
    requests = [
        Request(
            request_id=str(i),
            token_ids=p,
            max_new_tokens=16,
            expected_output_tokens=estimates[i],
            priority=priorities[i],
        )
        for i, p in enumerate(prompts)
    ]
    return requests, plan_prefix_groups(prompts)


def config_of(sharing: Any) -> EngineConfig:
    return EngineConfig(block_size=4, sharing=sharing)


@pytest.mark.parametrize(
    ("order", "by_group", "one_by_one"),
    [
        # Tokens expected to decode for those to prefill are 22/43, 7/22, 4/2, or, one by one, 7/42, 2/21, 4/2, 15/41,
        # 5/21, 2/21.
        ("ratio", [(2,), (0, 3), (1, 4)], [2, 3, 4, 0, 1, 5]),
        ("fcfs", [(0, 3), (1, 4), (2,)], [0, 1, 2, 3, 4, 5]),
        ("sjf", [(1, 4), (2,), (0, 3)], [1, 5, 2, 4, 0, 3]),
        ("priority", [(1, 4), (2,), (0, 3)], [5, 2, 1, 0, 3, 4]),
    ],
)
def test_groups_start_in_order(order: str, by_group: list[tuple[int, ...]], one_by_one: list[int]) -> None:
    requests, groups = three_groups()
    grouped = order_groups(schedule_groups(requests, groups, (), config_of("path")), order)  # type: ignore[arg-type]
    assert [tuple(s.owners[0] for s in group) for group in grouped] == by_group
    assert {s.owners for group in grouped for s in group} == {(0,), (1, 5), (2,), (3,), (4,)}
    for sharing in ("none", "lru"):
        alone = order_groups(schedule_groups(requests, groups, (), config_of(sharing)), order)  # type: ignore[arg-type]
        assert [s.owners[0] for group in alone for s in group] == one_by_one


def test_what_is_skipped_is_in_no_group() -> None:
    requests, groups = three_groups()
    for sharing in ("path", "group", "lru", "none"):
        scheduled = schedule_groups(requests, groups, {0, 5}, config_of(sharing))
        assert sorted(s.owners for group in scheduled for s in group) == [(1,), (2,), (3,), (4,)]


def test_a_single_level_shares_no_runs_above_groups() -> None:
    prompts = [[1] * 12 + [document] * 8 + [tail] for document in (2, 3) for tail in (5, 6)]
    requests = [Request(request_id=str(i), token_ids=p) for i, p in enumerate(prompts)]
    groups = plan_prefix_groups(prompts)
    for sharing, lengths in (("path", [12, 8]), ("group", [20])):
        for group in schedule_groups(requests, groups, (), config_of(sharing)):
            assert group[0].node is not None
            assert [len(node.token_ids) for node in group[0].node.chain()] == lengths


def answer(estimate: int | None, num_output_tokens: int = 0, max_new_tokens: int = 101) -> Sequence:
    request = Request(
        request_id="a", token_ids=[1] * 10, max_new_tokens=max_new_tokens, expected_output_tokens=estimate
    )
    sequence = Sequence(request=request, owners=(0,), node=None)
    for _ in range(num_output_tokens):
        sequence.set_token(sequence.length, 7)
    return sequence


def test_the_reserve_learns_from_answers() -> None:
    reserve = OutputReserve(0.5)
    assert reserve.num_tokens(answer(None)) == 10 + 50
    assert reserve.num_tokens(answer(20)) == 10 + 10
    assert reserve.num_tokens(answer(500)) == 10 + 50
    for _ in range(16):
        reserve.book(answer(None, 40))
    assert reserve.num_tokens(answer(None)) == 10 + 20
    assert reserve.num_tokens(answer(20)) == 10 + 10, "estimates are judged by answers that had one"
    for _ in range(16):
        reserve.book(answer(20, 30))
    assert reserve.num_tokens(answer(20)) == 10 + 15, "answers were half as long again as expected"
    assert reserve.num_tokens(answer(40)) == 10 + 30
    assert reserve.num_tokens(answer(40, num_output_tokens=90)) == 100, "an answer beyond what was expected of it"
    assert OutputReserve(0.0).num_tokens(answer(20)) == 10
    scored = Request(request_id="s", token_ids=[1] * 10, mode="score", labels=((1,), (2, 3, 4)))
    assert OutputReserve(1.0).num_tokens(Sequence(request=scored, owners=(0,), node=None)) == 12


def test_a_batch_starts_when_the_one_before_is_done() -> None:
    def windows(batching: Any) -> list[float]:
        config = EngineConfig(batching=batching, max_num_batched_tokens=64)
        return [admission_window_tokens(config, is_idle=is_idle) for is_idle in (True, False)]

    assert windows("continuous") == [float("inf"), float("inf")]
    assert windows("static") == [float("inf"), 0]
    assert windows("dynamic") == [64, 0]
