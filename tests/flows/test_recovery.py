"""Runs that do not complete: stopped from outside, killed, damaged, or unable to write to the database."""

import logging
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prefect import flow

from engine.errors import ArtifactError, DatabaseError
from engine.execution.step_record import StepRecord
from flows.workload_run import end_run, write_rows
from tasks import recover
from tasks.infer import infer
from tasks.partitions import attempt, in_time
from tasks.partitions.engine_host import PROCESS_HOST
from tasks.plan_prefix import write_plan
from tasks.read import read
from tasks.recover import recover_runs, stop_run, sweep_runs
from tasks.report import write_report
from tasks.runs.infer_job import InferJob
from tasks.runs.progress import PartitionProgress
from tasks.runs.run import Run
from tasks.tokenize import read_max_model_len, write_tokens
from tasks.workloads.workload import load_workload
from tests.full_disk import files_of_at_most
from tests.sources import make_job, make_source

pytestmark = pytest.mark.usefixtures("prefect_server")


def test_a_stop_request_ends_a_night_as_ctrl_c_does(nights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    try_rows = attempt.try_rows

    def try_then_stop(rows: Any, work: Any, piece: Any) -> Any:
        failure = try_rows(rows, work, piece)
        work.job.stop.make()
        return failure

    monkeypatch.setattr(attempt, "try_rows", try_then_stop)
    with pytest.raises(KeyboardInterrupt):
        nights.run("snippets", partition_tokens=1)
    monkeypatch.undo()
    ((status, num_ok, num_unanswered),) = nights.sql("select status, num_ok, num_unanswered from runs")
    assert (status, num_ok + num_unanswered) == ("interrupted", 12)
    assert 3 <= num_ok < 12
    (rest,) = nights.run("snippets")
    assert (rest.num_ok, rest.num_already_done) == (num_unanswered, num_ok)


def begin_run(nights: Any, source: str = "snippets") -> Run:
    """A run that has read its requests and whose process has ended."""
    workload = load_workload(source)
    run = Run.begin(make_source(nights.path), workload, {})
    run.note({"requests": read.fn(make_source(nights.path), workload, run.folder).requests})
    return run


def test_answers_that_cannot_be_written_are_said_to_stay(nights: Any) -> None:
    run = begin_run(nights)
    nights.sql("alter table documents rename column title to name")  # while the night computes
    message = f"table 'documents' has no column 'title'.*; the answers stay in {run.folder}, and the next run writes"
    end_run(run, 0)
    end = flow(name="end", persist_result=False)(lambda: write_rows(load_workload("snippets"), run))
    with pytest.raises(DatabaseError, match=message):
        end()
    nights.sql("alter table documents rename column name to title")
    assert [left.record.run_id for left in sweep_runs(nights.path)] == [run.record.run_id]


def test_a_run_that_had_read_nothing_leaves_nothing(nights: Any) -> None:
    run = Run.begin(make_source(nights.path), load_workload("snippets"), {})
    recover_runs(nights.path)
    assert not Path(run.folder).exists()
    assert nights.sql("select count(*) from runs") == [(0,)]


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_run_that_ended_before_its_invalid_rows_were_counted_leaves_nothing(nights: Any, is_killed: bool) -> None:
    nights.sql("update documents set body = null")
    source, workload = make_source(nights.path), load_workload("snippets")
    run = Run.begin(source, workload, {"failures": {"max_invalid_rate": 0.1}})
    run.note({"requests": read.fn(source, workload, run.folder).requests})
    if is_killed:
        recover_runs(nights.path)
    else:
        stop_run(run, workload, KeyboardInterrupt())
    assert not run.folder.exists()
    assert nights.sql("select count(*) from runs union all select count(*) from snippets") == [(0,), (0,)]


def test_a_run_whose_process_died_is_interrupted(nights: Any, caplog: pytest.LogCaptureFixture) -> None:
    run = begin_run(nights)
    with caplog.at_level(logging.INFO, "batchloom"):
        recover_runs(nights.path)
    assert nights.sql("select status, error, num_unanswered from runs") == [
        ("interrupted", "its process ended", 12),
    ]
    assert f"recovered run {Path(run.folder).name}" in caplog.text
    assert sweep_runs(nights.path) == []


def test_a_run_whose_process_died_gets_its_report_from_the_next_night(nights: Any) -> None:
    run, nothing_read = begin_run(nights), Run.begin(make_source(nights.path), load_workload("snippets"), {})
    (summary,) = nights.run("snippets")
    assert {page.parent.name for page in nights.runs.glob("*/report.html")} == {run.record.run_id, summary.run_id}
    assert "its process ended" in (Path(run.folder) / "report.html").read_text()
    assert not Path(nothing_read.folder).exists()


def test_a_damaged_run_is_dropped_and_does_not_keep_the_night(nights: Any, caplog: pytest.LogCaptureFixture) -> None:
    run = begin_run(nights)
    path = Path(run.folder) / "requests.parquet"
    path.write_bytes(path.read_bytes()[:-7])
    (summary,) = nights.run("snippets")
    assert summary.num_ok == 12
    assert not Path(run.folder).exists()
    assert "will be answered again" in caplog.text
    assert nights.sql("select count(*) from runs") == [(1,)]


def test_a_run_whose_files_cannot_be_read_now_stays_until_they_can(
    nights: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a network folder that is away for a moment; a link to itself stands for it."""
    job = begin_job(nights, tmp_path)
    (part,) = infer.fn(0, job) or []
    PROCESS_HOST.release()
    for path in (job.first.run_folder / "requests.parquet", Path(part.path), job.first.run_folder / "manifest.json"):
        path.rename(away := tmp_path / "away")
        path.symlink_to(path.name)
        recover_runs(nights.path)
        assert re.search(f"its answers stay in {job.first.run_folder}: {path} cannot be read: .*symbolic", caplog.text)
        away.replace(path)
    recover_runs(nights.path)
    assert nights.sql("select num_ok from runs") == [(12,)]


def test_a_run_of_a_lost_workload_stays_and_does_not_keep_the_night(
    nights: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "mine.toml"
    text = (Path(__file__).parents[2] / "workloads" / "snippets.toml").read_text()
    source.write_text(text)
    run = begin_run(nights, str(source))
    source.unlink()
    (summary,) = nights.run("snippets")
    assert summary.num_ok == 12
    assert f"its answers stay in {run.folder}" in caplog.text
    assert Path(run.folder).exists()
    source.write_text(text)
    recover_runs(nights.path)
    assert [run.record.run_id for run in sweep_runs(nights.path)] == []


def test_killed_runs_whose_workloads_were_changed_do_not_keep_the_night(
    nights: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = (
        ('key = ["doc_id", "query_id"]', 'key = ["doc_id", "query_text"]', "the key of the answers were changed in"),
        ('answer_column = "snippet"', 'answer_column = "text"', "the columns of the answers were changed in"),
        ("select_snippet_requests.sql", "gone.sql", "in the query of workload 'mine2': no table or view 'dropped'"),
    )
    text = (Path(__file__).parents[2] / "workloads" / "snippets.toml").read_text()
    (tmp_path / "gone.sql").write_text("select doc_id, query_id, title, body, query_text from dropped\n")
    for number, (old, new, _) in enumerate(changes):
        source = tmp_path / f"mine{number}.toml"
        own = text.replace('name = "snippets"', f'name = "mine{number}"')
        own = own.replace('table = "snippets"', f'table = "mine{number}"')
        source.write_text(own)
        workload = load_workload(str(source))
        settings = {"workload": {"key": list(workload.key), "columns": dict(workload.kind.columns)}}
        run = Run.begin(make_source(nights.path), workload, settings)
        run.note({"requests": read.fn(make_source(nights.path), workload, run.folder).requests})
        assert old in own
        source.write_text(own.replace(old, new))
    (summary,) = nights.run("snippets")
    assert summary.num_ok == 12
    for *_, message in changes:
        assert message in caplog.text
    assert not nights.sql("select * from information_schema.tables where table_name like 'mine%'")


def test_a_database_that_may_not_grow_keeps_the_answers_and_ends_the_night(nights: Any) -> None:
    """DuckDB says so when the transaction is committed."""
    run = begin_run(nights)
    with files_of_at_most(4096), pytest.raises(DatabaseError, match=r"File too large; [\d,]+ bytes free in"):
        recover_runs(nights.path)
    assert [left.record.run_id for left in sweep_runs(nights.path)] == [run.record.run_id]


def test_a_night_that_duckdb_has_no_memory_to_write_stays_and_ends_the_next(
    nights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, each night computed its rows again, to fail at the same write."""
    run = begin_run(nights)
    monkeypatch.setattr("tasks.write.MEMORY_LIMIT", "1kB")
    with pytest.raises(DatabaseError, match=r"(?i)memory"):
        recover_runs(nights.path)
    monkeypatch.undo()
    assert [left.record.run_id for left in recover_runs(nights.path)] == [run.record.run_id]


def test_a_run_whose_end_cannot_be_noted_stays_and_ends_the_night(nights: Any) -> None:
    """The disk on which a night died is still full; its answers wait until there is room."""
    run = begin_run(nights)
    message = r"manifest\.json cannot be written: File too large"
    with files_of_at_most(0), pytest.raises(ArtifactError, match=message):
        recover_runs(nights.path)
    assert [left.record.run_id for left in recover_runs(nights.path)] == [run.record.run_id]


@contextmanager
def mounted(folder: Path, shown: Path, options: str) -> Iterator[None]:
    """A folder or file is also seen at another place; root may write to any file that is not mounted for reading."""
    if subprocess.run(["mount", "--bind", str(folder), str(shown)], capture_output=True).returncode:
        pytest.skip("this user may not mount")
    try:
        subprocess.run(["mount", "-o", f"remount,bind,{options}", str(shown)], check=True)
        yield
    finally:
        subprocess.run(["umount", str(shown)], check=True)


def test_a_database_that_cannot_be_written_is_found_before_any_work(nights: Any) -> None:
    with mounted(nights.path, nights.path, "ro"):
        with pytest.raises(DatabaseError, match=r"team\.duckdb cannot be written: the file, its folder or its file"):
            nights.run("ranking")
        assert not nights.runs.exists()
        nights.run("ranking", sample=2)  # writes nothing


def test_a_folder_in_which_duckdb_cannot_make_its_log_is_found_before_any_work(nights: Any) -> None:
    nights.run("ranking", sample=2)
    database, runs = nights.path, nights.runs
    (shown := database.with_name("shown")).mkdir()
    nights.path = shown / database.name
    with mounted(shown.parent, shown, "ro"), mounted(database, nights.path, "rw"), mounted(runs, nights.runs, "rw"):
        with pytest.raises(DatabaseError, match=r"team\.duckdb cannot be written: the file, its folder or its file"):
            nights.run("ranking")
        assert {path.name for path in runs.iterdir()} <= {"cache", "lock"}


def test_a_table_replaced_during_the_night_ends_it_at_once(
    nights: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    end = Run.end

    def replace_table(run: Run, *given: str) -> None:
        nights.sql("create or replace table rankings (mine int)")
        end(run, *given)

    monkeypatch.setattr(Run, "end", replace_table)
    with pytest.raises(DatabaseError, match="table 'rankings' is not batchloom's"):
        nights.run("ranking")
    monkeypatch.undo()
    assert "Retrying" not in caplog.text
    nights.sql("drop table rankings")
    (summary,) = nights.run("ranking")
    assert (summary.num_ok, summary.num_already_done) == (0, 6)


def test_a_stopped_run_that_cannot_write_is_written_by_the_next(
    nights: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recover, "STOP_LOCK_TIMEOUT_SECONDS", 0.5)
    run = begin_run(nights)
    hold = (
        f"import duckdb, time; held = duckdb.connect({str(nights.path)!r}); print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        stop_run(run, load_workload("snippets"), KeyboardInterrupt())
        holder.kill()
    assert "the next run will write what this one finished" in caplog.text
    (summary,) = nights.run("snippets")
    assert summary.num_ok == 12
    assert nights.sql("select status, error from runs order by started_at") == [
        ("interrupted", "told to stop"),
        ("completed", None),
    ]


def begin_job(nights: Any, tmp_path: Path) -> InferJob:
    """Of a run with one partition."""
    run = begin_run(nights)
    model_len = read_max_model_len(nights.model, "auto")
    requests = run.artifacts["requests"]
    tokens = write_tokens(
        requests, str(tmp_path / "tokens.parquet"), load_workload("snippets"), nights.model, model_len
    )
    plan = write_plan(tokens, str(tmp_path / "plan.parquet"), "exact", 10_000_000, 48)
    return make_job(run.folder, load_workload("snippets"), nights.model, plan=plan)


def lengthen_steps(monkeypatch: pytest.MonkeyPatch, seconds_of: Callable[[StepRecord], float]) -> None:
    """Has each step take so many seconds more."""
    add = PartitionProgress.add

    def add_slowly(progress: PartitionProgress, step: StepRecord) -> None:
        time.sleep(seconds_of(step))
        add(progress, step)

    monkeypatch.setattr(PartitionProgress, "add", add_slowly)


def test_a_finished_part_is_not_computed_again(nights: Any, tmp_path: Path) -> None:
    job = begin_job(nights, tmp_path)
    (part,) = infer.fn(0, job) or []
    assert part.num_rows == 12
    without_model = replace(job, checkpoint=str(tmp_path / "gone"), model_digest="other")
    assert infer.fn(0, without_model) == [part]
    answers = pq.read_table(part.path).drop_columns("compute_ms")
    Path(part.path).write_bytes(Path(part.path).read_bytes()[:-9])
    (again,) = infer.fn(0, job) or []
    assert again.path != part.path
    assert pq.read_table(again.path).drop_columns("compute_ms") == answers
    PROCESS_HOST.release()


def test_answers_are_kept_while_a_partition_is_computed(
    nights: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "KEEP_SECONDS", 0.0)
    lengthen_steps(monkeypatch, lambda step: 0.2 if step.step == 3 else 0.0)
    job = begin_job(nights, tmp_path)
    job = replace(job, engine=replace(job.engine, kv_memory_bytes=1 << 20, max_num_batched_tokens=64))
    parts = infer.fn(0, job) or []
    assert len(parts) > 2
    answers = pa.concat_tables([pq.read_table(part.path) for part in parts]).sort_by("row_id")
    assert answers["row_id"].to_pylist() == list(range(12))
    steps = pa.concat_tables([pq.read_table(path) for path in Path(job.first.run_folder).glob("steps/*.parquet")])
    steps = steps.sort_by("step")
    assert steps["step"].to_pylist() == list(range(steps.num_rows))
    begins = steps["started_at"].to_pylist()
    assert begins == sorted(begins)

    # As if the process had been killed before its last part: the others are not computed again.
    Path(parts[-1].path).unlink()
    *kept, rest = infer.fn(0, job) or []
    assert kept == parts[:-1]
    assert rest.num_rows == parts[-1].num_rows
    again = pa.concat_tables([pq.read_table(part.path) for part in (*kept, rest)]).sort_by("row_id")
    shared = ["compute_ms", "num_cached_tokens"]  # these depend on who is computed together
    assert again.drop_columns(shared) == answers.drop_columns(shared)
    PROCESS_HOST.release()


def test_a_deadline_leaves_answers_where_no_partition_fits(
    nights: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All prompts at once take longer than the time that is left before the first answer ends."""
    monkeypatch.setattr(in_time, "FIRST_TOKENS", 250)
    lengthen_steps(monkeypatch, lambda step: 0.002 * step.num_tokens)
    job = begin_job(nights, tmp_path)
    job = replace(job, engine=replace(job.engine, max_num_batched_tokens=128))
    with PROCESS_HOST.use(job):
        pass
    job = replace(job, deadline=time.time() + 1.5)
    parts = infer.fn(0, job) or []
    assert 0 < sum(part.num_rows for part in parts) < 12
    assert time.time() < (job.deadline or 0) + 0.5
    assert job.stop.is_overdue
    (Path(job.first.run_folder) / "overdue").unlink()
    rest = infer.fn(0, replace(job, deadline=time.time() + 600)) or []
    answers = pa.concat_tables([pq.read_table(part.path) for part in rest]).sort_by("row_id")
    assert answers["row_id"].to_pylist() == list(range(12))
    PROCESS_HOST.release()


def test_a_report_that_is_made_again_stays(nights: Any) -> None:
    run = begin_run(nights)
    recover_runs(nights.path)
    shutil.rmtree(run.folder)
    page, _ = write_report(nights.path, run.record.run_id)
    assert sweep_runs(nights.path) == []
    assert page.exists()
