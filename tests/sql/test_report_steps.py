"""The numbers of a report that come from steps: clock, cool-down and TECD, utilisation, bins that keep valleys."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import duckdb
import pytest

from sql import statement
from tests.sql.report_facts import CHUNK, Step, read_facts


def test_cool_down_begins_after_the_last_step_that_is_full_or_leaves_requests_waiting(
    night: Any, make_run: Callable[..., str]
) -> None:
    make_run(
        [
            (0, 100, 5, 10.0),
            (0, 40, 3, 20.0),  # a valley: not full, though requests wait
            (0, 100, 0, 30.0),
            (0, 60, 0, 40.0),
            (0, 10, 0, 50.0),
            (1, 30, 0, 60.0),  # not full, but a later step of its partition is
            (1, 100, 0, 70.0),
            (1, 20, 0, 80.0),
            (1, 5, 0, 90.0),
        ]
    )
    facts = read_facts(night)
    assert [each.is_cool_down for each in facts.bins] == [False] * 3 + [True] * 2 + [False] * 2 + [True] * 2
    totals = facts.totals
    assert (totals.num_steps, totals.num_partitions, totals.max_num_batched_tokens) == (9, 2, CHUNK)
    assert totals.step_seconds == pytest.approx(0.450)
    assert totals.partition_cool_down_seconds == pytest.approx(0.040 + 0.050 + 0.080 + 0.090)
    assert totals.tecd_seconds == pytest.approx(0.450 - 0.080 - 0.090), "only the run's own cool-down is left out"
    assert totals.num_tecd_steps == 7
    assert totals.utilisation == pytest.approx(465 / 900)
    assert totals.tecd_utilisation == pytest.approx(440 / 700)
    assert (totals.num_valley_steps, totals.valley_seconds) == (2, pytest.approx(0.080))
    assert [(each.partition, each.cool_down_seconds) for each in facts.partitions] == [
        (1, pytest.approx(0.170)),
        (0, pytest.approx(0.090)),
    ]
    assert [each.duration_ms for each in facts.slow_steps] == [90, 80, 70, 60, 50, 40, 30, 20, 10]


def test_time_goes_on_through_partitions(night: Any, make_run: Callable[..., str]) -> None:
    make_run([(0, 1, 0, 250.0), (0, 2, 0, 500.0), (3, 3, 0, 125.0)])
    assert [(each.started_seconds, each.ended_seconds) for each in read_facts(night).bins] == [
        (0.0, 0.25),
        (0.25, 0.75),
        (0.75, 0.875),
    ]


def test_engines_side_by_side_come_one_after_the_other(night: Any, make_run: Callable[..., str]) -> None:
    """Each with its own clock, in the order in which it did its partitions; the longest says how long the run took."""
    run_id = make_run(
        [
            (0, 100, 0, 10.0),
            (0, 20, 0, 5.0),
            (1, 100, 0, 40.0),  # begun first, by engine 0
            (2, 100, 0, 10.0),
            (2, 20, 0, 1.0),
        ]
    )
    for partition, worker, started_at in ((0, "b", 2), (1, "a", 1), (2, "b", 1.5)):
        night.sql(
            "update steps set worker = ?, started_at = '2026-01-01 00:00:00+00'::timestamptz + to_seconds(? + step / 9)"
            " where partition = ?",
            [worker, started_at, partition],
        )
    facts = read_facts(night, run_id)
    assert [(each.engine, each.first_partition, each.is_cool_down) for each in facts.bins] == [
        (0, 1, False), (1, 2, False), (1, 2, True), (1, 0, False), (1, 0, True),
    ]  # fmt: skip
    assert [each.started_seconds * 1000 for each in facts.bins] == pytest.approx([0, 40, 50, 51, 61])
    by_partition = {each.partition: each.started_seconds * 1000 for each in facts.slow_steps if each.duration_ms >= 10}
    assert by_partition == {1: 0, 2: 0, 0: pytest.approx(11)}
    totals = facts.totals
    assert (totals.num_engines, totals.num_partitions, totals.num_steps, totals.num_tecd_steps) == (2, 3, 5, 4)
    assert totals.step_seconds * 1000 == pytest.approx(66)
    assert totals.elapsed_seconds * 1000 == pytest.approx(40)
    assert totals.tecd_seconds * 1000 == pytest.approx(40), "engine 1 takes 26 ms, 5 of them cool-down"
    assert totals.partition_cool_down_seconds * 1000 == pytest.approx(6)
    assert [(each.worker, each.num_partitions, each.num_steps) for each in facts.engines] == [("a", 1, 1), ("b", 2, 4)]
    assert [each.tecd_seconds * 1000 for each in facts.engines] == pytest.approx([40, 21])


def test_padding_fills_a_step_and_is_no_use_of_it(night: Any, make_run: Callable[..., str]) -> None:
    make_run([(0, 60, 0, 1.0), (0, 10, 0, 1.0)], num_padding_tokens=40, num_swapped_kv_blocks=7)
    facts = read_facts(night)
    assert [(each.mean_padding_tokens, each.max_tokens, each.max_rows) for each in facts.bins] == [
        (40, 60, 100), (40, 10, 50),
    ]  # fmt: skip
    assert [each.is_cool_down for each in facts.bins] == [False, True]
    assert (facts.totals.num_padding_tokens, facts.totals.peak_swapped_kv_blocks) == (80, 7)
    assert facts.totals.utilisation == pytest.approx(0.35)


@pytest.mark.parametrize(
    ("steps", "tecd_ms"),
    [
        ([(0, 3, 0, 8.0), (0, 1, 0, 4.0)], 0.0),  # never full, never waiting: all of it is cool-down
        ([(0, 3, 1, 8.0), (0, 1, 0, 4.0)], 8.0),
        ([(0, 100, 0, 8.0), (0, 100, 0, 4.0)], 12.0),  # full to the end: none
    ],
)
def test_tecd_at_its_ends(night: Any, make_run: Callable[..., str], steps: list[Step], tecd_ms: float) -> None:
    make_run(steps)
    assert read_facts(night).totals.tecd_seconds * 1000 == pytest.approx(tecd_ms)


@pytest.mark.parametrize(
    ("config", "largest", "token_budget"),
    [
        ({}, 60, 60),
        ({"engine": {"max_num_batched_tokens": "auto"}}, 60, 2048),  # a CPU's
        ({"engine": {"max_num_batched_tokens": "auto"}}, 8192, 8192),  # a GPU's, of an earlier version
        ({"engine": {"max_num_batched_tokens": "auto"}, "step_tokens": 16384}, 60, 16384),
        ({"engine": {"max_num_batched_tokens": 128}, "step_tokens": None}, 60, 128),
    ],
)
def test_without_a_chunk_size_the_largest_step_stands_in(
    night: Any, make_run: Callable[..., str], config: dict[str, Any], largest: int, token_budget: int
) -> None:
    make_run([(0, largest // 2, 1, 1.0), (0, largest, 0, 1.0)], config=config)
    totals = read_facts(night).totals
    assert totals.max_num_batched_tokens == token_budget
    assert totals.utilisation == pytest.approx(0.75 * largest / token_budget)


def test_bins_cover_every_step_once_and_keep_the_valley(night: Any, make_run: Callable[..., str]) -> None:
    num_steps, valley = 1003, 517
    run_id = make_run([(step // 400, 7 if step == valley else 90 + step % 10, 1, 2.0) for step in range(num_steps)])
    bins = read_facts(night).bins
    assert len(bins) == 240
    assert [bins[0].first_position, bins[-1].last_position] == [0, num_steps - 1]
    assert all(left.last_position + 1 == right.first_position for left, right in pairwise(bins))
    assert {each.last_position - each.first_position + 1 for each in bins} == {4, 5}
    (low,) = (each for each in bins if each.min_tokens < 90)
    assert low.first_position <= valley <= low.last_position
    assert (low.min_tokens, low.min_kv_blocks) == (7, 7)
    for each in bins:
        most = each.max_kv_blocks
        owners = (each.prefix_kv_blocks_at_max, each.request_kv_blocks_at_max, each.cached_kv_blocks_at_max)
        assert owners == (most // 2, most // 4, most // 8), "of one and the same step"
        assert each.max_held_kv_blocks == most + most // 8
    assert low.max_tokens >= 90
    assert low.mean_decode_tokens > 60
    counted = sum(each.mean_decode_tokens * (each.last_position - each.first_position + 1) for each in bins)
    assert night.sql("select sum(num_decode_tokens) from steps where run_id = ?", [run_id]) == [(round(counted),)]


def test_utilisation_counts_each_step_in_its_tenth(night: Any, make_run: Callable[..., str]) -> None:
    make_run([(0, 100, 1, 1.0), (0, 90, 1, 2.0), (0, 89, 1, 4.0), (0, 10, 1, 8.0), (0, 9, 0, 16.0)])
    tenths = read_facts(night).utilisation
    assert [each.tenth for each in tenths] == list(range(10))
    assert [each.num_steps for each in tenths] == [1, 1, 0, 0, 0, 0, 0, 0, 1, 2]
    assert [round(each.seconds * 1000) for each in tenths] == [16, 8, 0, 0, 0, 0, 0, 0, 4, 3]
    assert [round(each.cool_down_seconds * 1000) for each in tenths] == [16] + [0] * 9


def test_an_analyst_runs_the_same_statements(night: Any, make_run: Callable[..., str]) -> None:
    """As in any SQL client: the timeline first, then any other query."""
    run_id = make_run([(0, 100, 0, 1.0), (0, 50, 0, 3.0)])
    with duckdb.connect(str(night.path), read_only=True) as connection:
        connection.execute(statement("report/steps/timeline"), {"run_id": run_id})
        totals = connection.sql(statement("report/steps/totals")).fetchall()[0]
        columns = connection.sql(statement("report/steps/totals")).columns
    assert dict(zip(columns, totals, strict=True))["tecd_seconds"] == pytest.approx(0.001)
