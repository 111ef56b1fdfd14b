"""Runs to a deadline over a fake clock: they end in time, whatever steps take, and their forecast is corrected."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flows.in_time import submit_in_time
from tasks.nights.pace import Pace
from tasks.runs.infer_job import StopRequest
from tasks.runs.run import Run
from tasks.storage.artifact import ArtifactRef
from tasks.workloads.workload import load_workload
from tests.sources import make_source

DEADLINE = 1000.0


@dataclass
class Engine:
    """Stands for an engine of this process: partitions are computed as they are submitted, step by step."""

    steps: list[list[float]]
    stop: StopRequest
    now: float = 0.0
    begun: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    longest: float = 0.0

    def submit(self, task: Any, given: dict[str, Any]) -> Any:
        partition = given["partition"]
        self.begun.append(partition)
        for number, seconds in enumerate(self.steps[partition]):
            self.now += seconds
            self.longest = max(self.longest, seconds)
            if not self.stop.has_time(seconds) and number < len(self.steps[partition]) - 1:
                break
        else:
            self.done.append(partition)
        return SimpleNamespace(add_done_callback=lambda call: call(None))

    def run(self, pace: Pace | None) -> None:
        given: dict[str, Any] = {"job": SimpleNamespace(stop=self.stop)}
        submit_in_time(self, range(len(self.steps)), given, 1, pace)  # type: ignore[arg-type]


@pytest.fixture
def make_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[list[float]]], Engine]]:
    numbers = iter(range(10_000))

    def make(steps: list[list[float]]) -> Engine:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        engine = Engine(steps, StopRequest(folder, DEADLINE))
        monkeypatch.setattr(time, "time", lambda: engine.now)
        return engine

    yield make
    monkeypatch.undo()


def make_pace(engine: Engine, forecast: list[float], load_seconds: float = 0.0) -> Pace:
    rows = [10] * len(forecast)
    return Pace(
        title="topics", order=range(len(forecast)), seconds=forecast, num_rows=rows, num_engines=1, begun=0.0,
        deadline=DEADLINE, load_seconds=load_seconds,
    )  # fmt: skip


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.floats(0.1, 120), min_size=1, max_size=12), min_size=1, max_size=30))
def test_a_run_is_never_later_than_a_step(make_engine: Any, steps: list[list[float]]) -> None:
    engine = make_engine(steps)
    engine.run(None)
    assert engine.begun == list(range(len(engine.begun))), "in order, each once"
    assert engine.done == engine.begun[: len(engine.done)]
    assert len(engine.begun) - len(engine.done) <= 1, "one partition at most is cut"
    assert engine.now < DEADLINE + engine.longest
    if sum(map(sum, steps)) + engine.longest < DEADLINE:
        assert len(engine.done) == len(steps)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(0.5, 60), st.integers(1, 20))
def test_a_run_of_equal_steps_ends_before_its_deadline(make_engine: Any, seconds: float, num_steps: int) -> None:
    engine = make_engine([[seconds] * num_steps] * 3000)
    engine.run(None)
    assert DEADLINE - 2 * seconds < engine.now <= DEADLINE


@pytest.mark.parametrize("seed", range(20))
def test_the_forecast_is_corrected(make_engine: Any, seed: int) -> None:
    """Partitions take `factor` times their forecast, give or take a fifth, and the first one loads the model."""
    random = Random(seed)
    forecast, factor = [random.uniform(10, 30) for _ in range(150)], random.uniform(0.5, 4)
    actual = [factor * seconds * random.uniform(0.8, 1.2) for seconds in forecast]
    actual[0] += random.uniform(0, 60)
    engine = make_engine([[seconds / 8] * 8 for seconds in actual])
    pace = make_pace(engine, forecast)
    engine.run(pace)
    num_done = 10 * len(engine.done)
    assert pace.half_time_rows is not None
    assert abs(pace.half_time_rows - num_done) <= 0.2 * num_done + 20
    assert 0.75 * factor < pace.factor < 1.3 * factor
    assert num_done <= pace.forecast_rows(engine.now) <= num_done + 10


def test_a_changed_forecast_is_said(make_engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine([[10.0] * 4] * 50)
    with caplog.at_level("INFO", "batchloom"):
        engine.run(make_pace(engine, [20.0] * 50))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "topics: partitions take 2.00 times what was forecast: 250 of 500 prompts should be done by the deadline"
    )
    assert len(engine.done) == 24, "the step that would end at the deadline is not begun"


def test_a_forecast_is_noted_in_rows_of_the_run(make_engine: Any, tmp_path: Path) -> None:
    """Of 500 prompts, half are done by the deadline: of 100 rows with five prompts each, 50."""
    run = Run.begin(make_source(tmp_path / "team.duckdb"), load_workload("ranking"), {"prediction": {}})
    run.note({"requests": ArtifactRef(path="requests.parquet", num_rows=100, digest="")})
    engine = make_engine([[10.0] * 4] * 50)
    pace = make_pace(engine, [20.0] * 50)
    engine.run(pace)
    pace.note(run)
    assert run.record.config["prediction"] == {"pace": 2.0, "half_time_rows": 50.0}


def test_loading_is_part_of_the_first_partition(make_engine: Any) -> None:
    """It says nothing of the others: the forecast stays right from the first partition's end on."""
    engine = make_engine([[100.0, 10.0, 10.0], *[[10.0, 10.0]] * 60])
    pace = make_pace(engine, [20.0] * 61, load_seconds=100.0)
    assert pace.forecast_rows(0.0) == 10 * 45
    pace.begin(0, 0.0)
    assert pace.forecast_rows(50.0) == 10 * 45
    pace.end(0, 120.0)
    assert pace.factor == 1.0
    assert pace.forecast_rows(120.0) == 10 * 45


def test_a_forecast_that_holds_is_not_repeated(make_engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A model that loads faster than forecast says nothing of the partitions."""
    engine = make_engine([[60.0, 10.0], [10.0, 10.0]])
    pace = make_pace(engine, [20.0] * 2, load_seconds=100.0)
    with caplog.at_level("INFO", "batchloom"):
        pace.begin(0, 0.0)
        pace.end(0, 70.0)
        assert (pace.factor, pace.forecast_rows(70.0)) == (1.0, 20)
        engine.run(make_pace(engine, [20.0] * 2, load_seconds=50.0))
    assert not caplog.records
