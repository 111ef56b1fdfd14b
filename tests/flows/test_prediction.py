"""The prediction of a night compared with the night."""

import json
from pathlib import Path
from typing import Any

import pytest
from prefect import flow

from engine.config import EngineConfig
from engine.planning.plan import SharingStats
from engine.simulation.simulation import SimulationSummary
from flows.foresight import foresee
from flows.prediction import predict_night
from flows.settings import EngineSettings, PlanSettings, WorkerSettings
from flows.workers import Night, Workers
from flows.workload_run import FEWEST_TOKENS_TO_PREDICT, find_source
from tasks.forecast.prediction import hand_out, predict, predict_run, spread
from tasks.nights.allotment import Portion
from tasks.report import write_report
from tasks.runs.infer_job import FailurePolicy
from tasks.runs.run import Run
from tasks.runs.source import Source
from tasks.storage.artifact import ArtifactRef
from tasks.storage.plan_file import PlanSummary
from tasks.workloads.workload import load_workload
from tests.sources import make_job

pytestmark = pytest.mark.usefixtures("prefect_server")


def add_long_documents(nights: Any) -> None:
    """Add enough candidates that the night is predicted."""
    nights.sql(
        "insert into documents"
        " select 'long' || i, 'House ' || i, repeat('house ' || i || ' at night ', 90 + i % 7) from range(100) as d (i)"
    )
    nights.sql("insert into ranking_candidates select 'q' || i % 3, 'long' || i from range(100) as d (i)")


def read_prediction(nights: Any) -> dict[str, float]:
    ((config,),) = nights.sql("select config from runs order by started_at desc limit 1")
    found: dict[str, float] = json.loads(config).get("prediction", {})
    return found


def test_a_night_of_some_length_is_predicted_and_compared(nights: Any) -> None:
    add_long_documents(nights)
    engine = EngineSettings(dtype="float32", kv_memory="8MiB", max_num_batched_tokens=512)
    nights.run("ranking", engine=engine, partition_tokens=20_000)
    prediction = read_prediction(nights)
    ((num_steps, num_tokens, num_partitions, peak_blocks),) = nights.sql(
        "select count(*), sum(num_decode_tokens + num_suffix_tokens + num_prefix_tokens), count(distinct partition),"
        " max(num_kv_blocks_used) from steps"
    )
    assert num_tokens > FEWEST_TOKENS_TO_PREDICT
    assert 2 <= (num_simulated := prediction["num_simulated_partitions"]) <= num_partitions
    assert prediction["num_steps"] == pytest.approx(num_steps, rel=0.1)
    assert prediction["num_computed_tokens"] == pytest.approx(num_tokens, rel=0.05)
    assert prediction["peak_kv_blocks"] == pytest.approx(peak_blocks, rel=0.1)
    assert prediction["num_preempted_requests"] == 0
    assert 0 < prediction["tecd_seconds"] <= prediction["step_seconds"]
    assert prediction["elapsed_seconds"] == pytest.approx(prediction["step_seconds"])
    page, facts = write_report(nights.path)
    assert facts.prediction.keys() >= prediction.keys()
    text = page.read_text()
    assert 'id="prediction"' in text
    assert f"simulated before the run, on {num_simulated} of its {num_partitions} partitions." in text
    assert all(title in text for title in ("tokens computed", "most KV blocks", "time of all steps"))

    nights.run("ranking", engine=engine)
    assert read_prediction(nights) == {}, "nothing new, nothing predicted"
    nights.sql("insert into documents values ('one more', 'House', 'He walks.')")
    nights.sql("insert into ranking_candidates values ('q0', 'one more')")
    nights.run("ranking", engine=engine)
    assert read_prediction(nights) == {}, "over before it would be predicted"


@pytest.mark.slow
def test_engines_side_by_side_are_predicted_and_reported_as_such(nights: Any) -> None:
    """A real night of two processes: the work of each, and the longest one compared with the prediction."""
    add_long_documents(nights)
    engine = EngineSettings(dtype="float32", kv_memory="16MiB", max_num_batched_tokens=512, num_threads=2)
    nights.run("ranking", engine=engine, partition_tokens=4_000, machines=WorkerSettings(workers=2))
    prediction = read_prediction(nights)
    workers = nights.sql(
        "select worker, sum(duration_ms) / 1000, max(num_kv_blocks_total), count(distinct partition)"
        " from steps group by worker order by worker"
    )
    assert [worker for worker, *_ in workers] == ["0", "1"]
    page, facts = write_report(nights.path)
    totals = facts.totals
    longest = max(seconds for _, seconds, _, _ in workers)
    assert (totals.num_engines, totals.elapsed_seconds) == (2, pytest.approx(longest))
    assert totals.step_seconds == pytest.approx(sum(seconds for _, seconds, _, _ in workers))
    assert totals.num_partitions == sum(num_partitions for *_, num_partitions in workers)
    assert totals.tecd_seconds <= longest <= facts.run.infer_seconds
    assert {num_blocks for _, _, num_blocks, _ in workers} == {totals.num_kv_blocks_total}, "each has half the memory"
    assert prediction["elapsed_seconds"] == pytest.approx(prediction["step_seconds"] / 2, rel=0.2)
    assert prediction["tecd_seconds"] <= prediction["elapsed_seconds"]
    assert prediction["num_steps"] == pytest.approx(totals.num_steps, rel=0.1)
    assert prediction["peak_kv_blocks"] == pytest.approx(totals.peak_kv_blocks, rel=0.1)
    text = page.read_text()
    assert 'id="engines"' in text
    assert all(title in text for title in ("time of the longest engine", ">engine 0<", ">engine 1<"))


def test_the_engine_that_is_free_takes_the_next_partition() -> None:
    seconds = [5.0, 1.0, 4.0, 3.0]
    assert hand_out([0, 2, 3, 1], seconds, 2) == {0: (0.0, 5.0), 2: (0.0, 4.0), 3: (4.0, 7.0), 1: (5.0, 6.0)}
    assert hand_out(range(4), seconds, 1) == {0: (0.0, 5.0), 1: (5.0, 6.0), 2: (6.0, 10.0), 3: (10.0, 13.0)}
    assert hand_out([0, 2, 3, 1], seconds, 9) == {number: (0.0, end) for number, end in enumerate(seconds)}


def test_a_night_that_cannot_be_predicted_goes_on(
    nights: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workload = load_workload("ranking")
    night = Night(
        source=Source(
            database=nights.path,
            model="gone",
            checkpoint=tmp_path / "gone",
            model_digest="",
            max_model_len=1024,
        ),
        engine=EngineConfig(device="cpu"),
        failures=FailurePolicy(),
        workers=Workers(WorkerSettings()),
    )
    run = Run.begin(night.source, workload, {"full": False})
    plan = ArtifactRef(path=str(tmp_path / "plan.parquet"), num_rows=1, digest="")
    sharing = SharingStats(num_logical_tokens=10**6, num_processed_tokens=10**6, num_best_tokens=1)
    summary = PlanSummary(
        num_rows=1,
        num_groups=1,
        num_partitions=1,
        partition_costs=(1,),
        partition_rows=(1,),
        partition_priorities=(0,),
        dispatch_order=(0,),
        sharing=sharing,
    )

    job = make_job(run.folder, workload, tmp_path / "gone", plan=plan, engine=EngineConfig(device="cpu"))

    @flow(name="unpredictable", persist_result=False)
    def unpredictable() -> None:
        predict_night(night, [run], job, summary)

    unpredictable()
    assert run.record.config == {"full": False}
    nights.path.write_text("no database")
    unpredictable()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    reasons = [warning.removeprefix("ranking: the run is not predicted: ") for warning in warnings]
    assert "config.json cannot be read" in reasons[0]
    assert reasons[1].startswith(f"{nights.path} cannot be opened: ")
    assert len(reasons) == 2


@pytest.mark.parametrize("num_engines", [1, 8])
def test_a_prediction_takes_a_hundredth_of_the_night(num_engines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    num_partitions, clock = 352, 0.0
    summary = PlanSummary(
        num_rows=num_partitions,
        num_groups=num_partitions,
        num_partitions=num_partitions,
        partition_costs=(5_000_000,) * num_partitions,
        partition_rows=(1,) * num_partitions,
        partition_priorities=(0,) * num_partitions,
        dispatch_order=tuple(range(num_partitions)),
        sharing=SharingStats(),
    )

    def simulate(partition: int) -> SimulationSummary:
        nonlocal clock
        clock += 1.0
        return SimulationSummary(seconds=50.0)

    monkeypatch.setattr("tasks.forecast.prediction.time.perf_counter", lambda: clock)
    found = predict(simulate, summary, num_engines, since=0.0)
    assert 0.01 * found.seconds <= clock <= 0.01 * found.seconds + 1


def foresee_with(nights: Any, name: str, workers: int) -> list[Portion]:
    engine = EngineConfig(device="cpu", kv_memory_bytes=16 << 20, num_threads=2)
    night = Night(
        source=find_source(nights.path, str(nights.model), engine, PlanSettings(), False, {}),
        engine=engine,
        failures=FailurePolicy(),
        workers=Workers(WorkerSettings(workers=workers)),
    )
    return flow(name="foresee", persist_result=False)(lambda: foresee(night, load_workload(name)))()


def test_time_is_reserved_for_the_engines_that_have_work(nights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One partition takes its whole time, however many engines there are."""
    found = list[dict[str, float]]()

    def watch(*given: Any) -> dict[str, float]:
        found.append(predict_run(*given))
        return found[-1]

    monkeypatch.setattr("flows.foresight.predict_run", watch)
    (portion,) = foresee_with(nights, "ranking", workers=2)
    assert portion.seconds == pytest.approx(found[0]["step_seconds"]) == pytest.approx(found[0]["elapsed_seconds"])


def test_each_of_several_engines_gets_as_many_partitions(nights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.planning.plan_partitions.LEAST_TOKENS", 400)
    assert [len(foresee_with(nights, "snippets", workers)) for workers in (1, 2, 4)] == [5, 4, 4]


@pytest.mark.parametrize(("count", "order"), [(0, []), (1, [0]), (2, [0, 1]), (3, [0, 2, 1]), (5, [0, 4, 2, 1, 3])])
def test_partitions_are_simulated_in_a_spread_order(count: int, order: list[int]) -> None:
    assert spread(count) == order
