"""When a night ends, and which partitions fit before."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.planning.cheapest_first import rank_cheapest_first
from engine.planning.plan_partitions import dispatch_order, place_groups
from tasks.forecast.prediction import find_fitting
from tasks.nights.deadline import find_deadline, parse_budget, parse_until
from tasks.runs.infer_job import StopRequest

LEFT = st.floats(0, 40, allow_subnormal=False)  # a share of a subnormal number may be 0
EVENING = datetime(2026, 3, 1, 22, 30, tzinfo=timezone(timedelta(hours=2)))


@pytest.fixture(autouse=True)
def in_athens(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The machine's clock: two hours before UTC, three from 03:00 on 29 March 2026 to 04:00 on 25 October."""
    monkeypatch.setenv("TZ", "EET-2EEST,M3.5.0/3,M10.5.0/4")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("text", "hours"),
    [("06:00", 7.5), ("23:00", 0.5), ("22:30", 24), ("22:30:36", 0.01), ("2026-03-03T22:30", 48),
     ("2026-03-01T21:30:00+00:00", 1)],
)  # fmt: skip
def test_until_is_the_next_such_time(text: str, hours: float) -> None:
    assert parse_until(text, EVENING) == EVENING + timedelta(hours=hours)


@pytest.mark.parametrize(
    ("text", "now", "end"),
    [("06:00", "2026-03-28T20:00Z", "2026-03-29T03:00Z"), ("06:00", "2026-10-24T20:00Z", "2026-10-25T04:00Z"),
     ("03:30", "2026-10-24T20:00Z", "2026-10-25T00:30Z"), ("03:30", "2026-10-25T00:40Z", "2026-10-25T01:30Z"),
     ("2026-07-01 06:00", "2026-03-01T20:00Z", "2026-07-01T03:00Z")],
)  # fmt: skip
def test_a_time_is_what_the_clock_will_show_after_it_was_set(text: str, now: str, end: str) -> None:
    assert parse_until(text, datetime.fromisoformat(now)) == datetime.fromisoformat(end)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90min", 5400), ("1h 30min", 5400), ("1h30min", 5400), ("45s", 45), ("1.5 h", 5400)]
)
def test_a_budget_is_a_length(text: str, seconds: float) -> None:
    assert parse_budget(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "90", "min", "1h and a bit", "0min", "3 minutes", "-1h", "90mins", "9" * 9 + "h", "9" * 400 + "h"]
)
def test_what_is_no_budget(text: str) -> None:
    with pytest.raises(ConfigError, match="budget must be a length of time"):
        parse_budget(text)


@pytest.mark.parametrize("text", ["six", "25:00", "06:61", "2026-03-01T22:00"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ConfigError, match="until"):
        parse_until(text, EVENING)


def test_the_earlier_limit_counts_and_leaves_time_to_write() -> None:
    assert find_deadline("", "", EVENING) is None
    both = find_deadline("06:00", "100min", EVENING)
    assert both == EVENING + timedelta(minutes=98)
    assert find_deadline("", "10s", EVENING) == EVENING + timedelta(seconds=9)


def test_a_deadline_is_a_stop_request(tmp_path: object) -> None:
    now = datetime.now(UTC).timestamp()
    assert StopRequest(tmp_path, now - 1).is_made
    assert StopRequest(tmp_path, now - 1).is_overdue
    assert not StopRequest(tmp_path, now + 60).is_made
    assert not StopRequest(tmp_path).is_overdue


@given(
    st.lists(st.floats(0.1, 10), min_size=1, max_size=12), st.integers(1, 3), st.floats(0, 40, allow_subnormal=False)
)
@example([0.4473529207740995, 4.0], 1, 0.4473529207740995)
def test_what_fits_is_what_engines_end_in_time(seconds: list[float], num_engines: int, left: float) -> None:
    """Against a night over a fake clock: each engine takes the next partition when it is free."""
    clocks, in_time, begun = [0.0] * num_engines, [], []
    for partition, length in enumerate(seconds):
        engine = min(range(num_engines), key=clocks.__getitem__)
        if clocks[engine] < left:
            begun.append(partition)
        clocks[engine] += length
        if clocks[engine] <= left:
            in_time.append(partition)
    shares = find_fitting(range(len(seconds)), seconds, num_engines, left)
    assert list(shares) == begun
    assert [partition for partition, share in shares.items() if share == 1] == in_time
    assert all(share > 0 for share in shares.values())
    done = sum(share * seconds[partition] for partition, share in shares.items())
    assert done == pytest.approx(sum(min(clock, left) for clock in clocks))


@given(st.lists(st.tuples(st.integers(1, 10_000), st.integers(-3, 3), st.integers(1, 50)), min_size=1, max_size=40))
def test_priority_comes_before_cost(groups: list[tuple[int, int, int]]) -> None:
    costs, priorities, num_rows = (np.array(column, np.int64) for column in zip(*groups, strict=True))
    ranks = rank_cheapest_first(costs, priorities, num_rows)
    partitions = place_groups(costs, ranks, 1)
    turns = dispatch_order(partitions, np.bincount(partitions, weights=costs), ranks)
    order = np.argsort([turns.index(p) for p in partitions.tolist()], kind="stable")
    per_row = (costs / num_rows)[order]
    for place, (one, other) in enumerate(pairwise(order.tolist())):
        assert priorities[one] >= priorities[other]
        if priorities[one] == priorities[other]:
            assert per_row[place] <= 1.19 * per_row[place + 1] + 1e-9
