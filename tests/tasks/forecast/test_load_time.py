"""What earlier nights say of loading a model and of its steps, and what is said where no night has loaded it yet."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import ModelError
from tasks.database.connection import connect
from tasks.database.schema import create_schema
from tasks.forecast.load_time import find_speed_ratio, forecast_load
from tests.sources import make_source


def test_a_folder_without_weights_is_refused_in_a_line(tmp_path: Path) -> None:
    with connect(tmp_path / "team.duckdb", create=True) as connection:
        create_schema(connection)
    given = (make_source(tmp_path / "team.duckdb", checkpoint=tmp_path), EngineConfig(device="cpu"))
    with pytest.raises(ModelError, match="the folder holds no weights"):
        forecast_load(*given)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="the folder holds no weights"):
        forecast_load(*given)
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 16))
    assert forecast_load(*given) > 0


def test_one_slow_load_does_not_keep_later_nights_from_beginning(tmp_path: Path) -> None:
    """The forecast is the median of the runs that loaded the model, and nights that were not begun lower it."""
    path, engine = tmp_path / "team.duckdb", EngineConfig(device="cpu", dtype="float32")
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 16))
    source = make_source(path, checkpoint=tmp_path)

    def add_run(day: float, load_seconds: float | None, status: str = "completed") -> None:
        """A run of the day with a step of ten seconds, or one without, if it was not begun."""
        with connect(path) as connection:
            connection.execute(
                "insert into runs by name select $run as run_id, 'topics' as workload, '' as workload_digest,"
                " 'm' as model, 'digest' as model_digest, $status as status, 10 + $seconds as infer_seconds,"
                """ '{"engine": {"device": "cpu", "dtype": "float32"}}' as config,"""
                " timestamptz '2026-01-01' + to_hours($hours) as started_at",
                {"run": f"r{day}", "status": status, "seconds": load_seconds, "hours": round(24 * day)},
            )
            if load_seconds is not None:
                connection.execute(
                    "insert into steps by name select $run as run_id, 0 as partition, 0 as step,"
                    " timestamptz '2026-01-01' as started_at, 10000.0 as duration_ms",
                    {"run": f"r{day}"},
                )

    with connect(path, create=True) as connection:
        create_schema(connection)
    add_run(1, 10_000.0)
    assert forecast_load(source, engine) == pytest.approx(10_000)
    add_run(2, None, "deadline")
    assert forecast_load(source, engine) < 60, "the time to read the files, where the only load was too slow"
    add_run(3, 20.0)
    assert forecast_load(source, engine) == pytest.approx(5_010), "a night has begun since, so both loads count"
    add_run(4, None, "deadline")
    add_run(4.1, None, "deadline")
    assert forecast_load(source, engine) == pytest.approx(20), "two workloads of one night"
    add_run(5, 30.0)
    assert forecast_load(source, engine) == pytest.approx(30)
    for number in range(100):
        add_run(6 + number / 200, 0.0)
    assert forecast_load(source, engine) == pytest.approx(30), "runs that found the model loaded say nothing of it"


def test_steps_take_as_long_as_in_earlier_nights(tmp_path: Path) -> None:
    """Runs that end early count by their tokens, and a ratio is of the simulation, not of an earlier correction."""
    path, engine = tmp_path / "team.duckdb", EngineConfig(device="cpu", dtype="float32")

    def add_run(number: int, seconds: float, num_tokens: int, *, model: str = "digest", **prediction: Any) -> None:
        settings = {"device": "cpu", "dtype": "float32"}
        config = json.dumps({"engine": settings} | ({"prediction": prediction} if prediction else {}))
        with connect(path) as connection:
            connection.execute(
                "insert into runs by name select $run as run_id, 'topics' as workload, '' as workload_digest,"
                " 'm' as model, $model as model_digest, 'deadline' as status, $config as config,"
                " timestamp '2026-01-01' + to_days($number) as started_at",
                {"run": f"r{number}", "model": model, "config": config, "number": number},
            )
            connection.execute(
                "insert into steps by name select $run as run_id, 0 as partition, unnest([0, 1]) as step,"
                " $tokens as num_suffix_tokens, 0 as num_prefix_tokens, 0 as num_decode_tokens,"
                " $seconds * 500 as duration_ms",
                {"run": f"r{number}", "tokens": num_tokens // 2, "seconds": seconds},
            )

    with connect(path, create=True) as connection:
        create_schema(connection)
    assert find_speed_ratio(make_source(path), engine) == 1.0
    add_run(1, 500.0, 1000)
    add_run(2, 500.0, 1000, model="another", step_seconds=1.0, num_computed_tokens=1000.0)
    assert find_speed_ratio(make_source(path), engine) == 1.0, "of this model nothing was predicted"
    add_run(3, 20.0, 1000, step_seconds=80.0, num_computed_tokens=8000.0)
    assert find_speed_ratio(make_source(path), engine) == pytest.approx(2.0)
    for number in (4, 5):
        add_run(number, 60.0, 8000, step_seconds=40.0, num_computed_tokens=8000.0, speed_ratio=2.0)
    assert find_speed_ratio(make_source(path), engine) == pytest.approx(3.0), "the median of 2, 3 and 3"
