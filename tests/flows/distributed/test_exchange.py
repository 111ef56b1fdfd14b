"""Workers that cannot see the run's folder exchange work and answers through an object store."""

import logging
import os
import platform
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import ArtifactError, ConfigError, ModelError, WorkerError
from engine.model.loading.checkpoint import checkpoint_digest
from flows.command.run_flow import run_flow
from flows.nightly import nightly
from flows.quality import sample
from flows.settings import WorkerSettings
from tasks.partitions.attempt import infer_partition
from tasks.partitions.engine_host import PROCESS_HOST
from tasks.plan_prefix import write_plan
from tasks.read import read
from tasks.recover import recover_runs, stop_run, sweep_runs
from tasks.runs.infer_job import FailurePolicy, StopRequest
from tasks.runs.object_store import PATIENCE_SECONDS, DamagedObjectError, ObjectStore
from tasks.runs.progress import read_counts
from tasks.runs.run import Run
from tasks.runs.run_exchange import LATE, RunExchange, local_job
from tasks.runs.worker_copy import PROCESS_COPY
from tasks.storage.scratch_folder import PREFIX
from tasks.tokenize import read_max_model_len, write_tokens
from tasks.workers.worker_pool import WorkerPool
from tasks.workloads.workload import load_workload
from tests.flows.distributed.object_server import ObjectServer, serve_objects
from tests.flows.distributed.worker_watch import find_workers, hold_worker, meanwhile, wait_until
from tests.full_disk import files_of_at_most
from tests.sources import make_job, make_source

ROOT = Path(__file__).parents[3]
AT_ONCE = FailurePolicy(retry_delay_seconds=0.01)


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """A store that knows neither folders nor renames; its address and token are in the environment."""
    from fsspec.config import conf, set_conf_env

    with serve_objects() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        set_conf_env(conf)  # as at the start of a process
        yield server
        conf.pop("jupyter")


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the workers' copies, which must be empty at the end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    PROCESS_COPY.remove()
    assert not [*folder.glob(f"*{PREFIX}*")]


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_workers_answer_through_a_folder_and_the_death_of_one_is_survived(
    nights: Any, tmp_path: Path, temporary_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nights.run("snippets", partition_tokens=1)
    undisturbed = nights.answers()
    store = tmp_path / "store"

    def kill() -> None:
        """Kill within a partition: its attempt is in the store, its part is not."""
        wait_until(lambda: [*store.glob("*/attempts/part-*")], pause_seconds=0.002)
        assert [folder.stat().st_mode & 0o077 for folder in store.iterdir()] == [0]
        os.kill(find_workers(os.getpid())[0], signal.SIGKILL)

    machines = WorkerSettings(workers=2, exchange=store.as_uri())
    with caplog.at_level(logging.INFO, "batchloom"), meanwhile(kill):
        (summary,) = nights.run("snippets", full=True, machines=machines, partition_tokens=1, failures=AT_ONCE)
    assert (summary.num_ok, summary.num_errors) == (12, 0)
    assert nights.answers() == undisturbed
    assert any("is handed out again" in message for message in caplog.messages)
    assert [*store.iterdir()] == [], "the run's folder there goes when the answers are written"
    for folder in temporary_folder.glob(f"{PREFIX}*"):  # of the one that was killed; its place was taken at once
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_a_sample_that_is_not_kept_leaves_nothing_in_the_store(nights: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert nights.run("snippets", sample=2, machines=WorkerSettings(workers=1, exchange=store.as_uri())) == []
    assert [*store.iterdir()] == []
    assert {path.name for path in nights.runs.iterdir()} == {"cache", "lock"}


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_the_next_night_deletes_what_a_sample_could_not(
    nights: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, away = tmp_path / "store", tmp_path / "away"

    def lose_store(*given: Any) -> None:
        store.rename(away)
        store.touch()

    monkeypatch.setattr(sample, "_show", lose_store)
    assert nights.run("snippets", sample=2, machines=WorkerSettings(workers=1, exchange=store.as_uri())) == []
    store.unlink()
    away.rename(store)
    (folder,) = nights.runs.glob("*-*")
    assert {path.name for path in folder.rglob("*") if path.is_file()} - {"part-00000.parquet"} == {"exchange"}
    (summary,) = nights.run("snippets")
    assert [*store.iterdir()] == []
    assert [folder.name for folder in nights.runs.glob("*-*")] == [summary.run_id]


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_workers_answer_a_workload_of_ones_own_through_an_object_store(
    nights: Any, objects: ObjectServer, tmp_path: Path
) -> None:
    nights.run("ranking", partition_tokens=1)
    scores = "select query_id, doc_id, score, label from latest_rankings order by all"
    undisturbed = nights.sql(scores)
    (tmp_path / "ranking.toml").write_text((ROOT / "workloads" / "ranking.toml").read_text())
    machines = WorkerSettings(exchange="jupyter://team/nights/")
    objects.num_refusals = 2
    (summary,) = nights.run(str(tmp_path / "ranking.toml"), full=True, machines=machines, partition_tokens=1)
    assert (summary.num_ok, summary.num_errors) == (6, 0)
    assert nights.sql(scores) == undisturbed
    assert objects.objects == {}
    steps = "select count(*), count(distinct (partition, step)) from steps where run_id = ?"
    ((num_steps, num_distinct),) = nights.sql(steps, [summary.run_id])
    assert num_steps == num_distinct > 0


class Shared:
    """A run that has put its work into a store, and a worker of it in this process."""

    def __init__(self, nights: Any, folder: Path, url: str) -> None:
        workload = load_workload("snippets")
        self.run = Run.begin(make_source(nights.path), workload, {})
        requests = read.fn(make_source(nights.path), workload, self.run.folder).requests
        model_len = read_max_model_len(nights.model, "auto")
        tokens = write_tokens(
            requests, str(folder / "tokens.parquet"), load_workload("snippets"), nights.model, model_len
        )
        self.run.note({"requests": requests, "tokens": tokens})
        self.job = make_job(
            self.run.folder,
            workload,
            "/nowhere",
            plan=write_plan(tokens, str(folder / "plan.parquet"), "exact", 1, 48),
            model_digest=checkpoint_digest(nights.model),
            engine=EngineConfig(dtype="float32", kv_memory_bytes=8 << 20, num_threads=1),
            exchange=f"{url}/{Path(self.run.folder).name}",
            model=str(nights.model),
        )
        self.end = RunExchange(self.run.folder, self.job.exchange)
        self.end.offer(self.job.plan)
        self.store = ObjectStore(self.job.exchange)

    def answer(self, partition: int) -> Any:
        with local_job(partition, self.job) as (here, publish):
            return infer_partition(partition, here, publish)


@pytest.fixture
def shared(nights: Any, objects: ObjectServer, tmp_path: Path, prefect_server: str) -> Iterator[Shared]:
    yield Shared(nights, tmp_path, "jupyter://nights")
    PROCESS_HOST.release()


def test_what_workers_finished_for_a_run_that_died_is_taken_by_the_next(
    nights: Any, shared: Shared, objects: ObjectServer
) -> None:
    (part,) = shared.answer(1)
    assert shared.run.list_parts() == [], "its process has not looked since"
    name = f"{Path(shared.run.folder).name}/parts/part-00000.parquet"
    objects.objects[f"nights/{name}"] = dict(next(iter(objects.objects.values())), content="aGFsZg==")  # half of one
    recover_runs(nights.path)
    assert nights.sql("select status, num_ok, num_unanswered from runs") == [
        ("interrupted", part.num_rows, 12 - part.num_rows)
    ]
    assert nights.sql("select count(*) > 0 from steps") == [(True,)]
    assert objects.objects == {}
    (rest,) = nights.run("snippets")
    assert (rest.num_rows, rest.num_ok) == (12, 12), "the run that died knew another model"


@contextmanager
def out_of_reach(folder: Path) -> Iterator[None]:
    """During the block a file is in place of a store's folder."""
    away = folder.rename(folder.with_name("away"))
    folder.touch()
    yield
    folder.unlink()
    away.rename(folder)


def test_a_run_that_died_waits_while_its_store_is_out_of_reach(
    nights: Any, tmp_path: Path, temporary_folder: Path, prefect_server: str, caplog: pytest.LogCaptureFixture
) -> None:
    shared, folder = Shared(nights, tmp_path, f"file://{tmp_path}/objects"), tmp_path / "objects"
    (part,) = shared.answer(1)
    PROCESS_HOST.release()
    with out_of_reach(folder):
        recover_runs(nights.path)
    assert f"its answers stay in {shared.run.folder}: what its workers have answered is out of reach" in caplog.text
    assert nights.sql("select count(*) from runs") == [(0,)]
    recover_runs(nights.path)
    assert nights.sql("select num_ok from runs") == [(part.num_rows,)]
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ArtifactError("the store cannot be reached")])
def test_a_run_that_ends_waits_while_its_store_is_out_of_reach(
    nights: Any, tmp_path: Path, prefect_server: str, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    """Also where the run itself has seen none of the answers."""
    shared, folder = Shared(nights, tmp_path, f"file://{tmp_path}/objects"), tmp_path / "objects"
    (part,) = shared.answer(1)
    PROCESS_HOST.release()
    with out_of_reach(folder):
        stop_run(shared.run, load_workload("snippets"), error)
    assert f"its answers stay in {shared.run.folder}: what its workers have answered is out of reach" in caplog.text
    recover_runs(nights.path)
    status = "failed" if isinstance(error, Exception) else "interrupted"
    assert nights.sql("select status, num_ok from runs") == [(status, part.num_rows)]
    assert list(folder.iterdir()) == []


def test_what_late_workers_write_to_the_store_is_deleted_by_the_next_night(
    nights: Any, shared: Shared, objects: ObjectServer
) -> None:
    shared.answer(0)
    (shared.run.folder / LATE).touch()
    stop_run(shared.run, load_workload("snippets"), KeyboardInterrupt())
    assert objects.objects == {}
    shared.answer(1)
    assert objects.objects
    assert sweep_runs(nights.path) == []
    assert objects.objects == {}
    assert not (shared.run.folder / "exchange").exists()


def test_parts_that_were_taken_before_are_not_taken_again(shared: Shared) -> None:
    shared.answer(0)
    shared.end.take()
    (part,) = shared.run.list_parts()
    inode = Path(part.path).stat().st_ino
    RunExchange(shared.run.folder, shared.job.exchange).take()
    assert Path(part.path).stat().st_ino == inode


def test_a_worker_takes_over_what_another_one_did_of_a_partition(shared: Shared, temporary_folder: Path) -> None:
    parts = shared.answer(0)
    PROCESS_COPY.remove()  # another host
    without_model = replace(shared.job, engine=EngineConfig(device="cuda:99"))
    with local_job(0, without_model) as (here, publish):
        taken_over = infer_partition(0, here, publish)
    assert [part.digest for part in taken_over or []] == [part.digest for part in parts]
    shared.end.take()
    found = shared.end.find(parts)
    assert found == shared.run.list_parts()
    assert len(shared.run.list_steps()) == 1
    assert read_counts(shared.run.folder).num_rows == found[0].num_rows


def test_finished_parts_are_taken_from_the_store_where_a_worker_dies_after_the_deadline(shared: Shared) -> None:
    parts = shared.answer(0)
    overdue = replace(shared.job, deadline=time.time() + 0.5)
    with closing(WorkerPool([{}])) as pool, meanwhile(partial(hold_worker, lambda: overdue.stop.is_made)):
        found = pool.answer(0, overdue)
    assert found == shared.end.find(parts) == shared.run.list_parts()


def test_a_stop_request_travels_both_ways(shared: Shared) -> None:
    with shared.end.taking(), local_job(0, shared.job) as (here, _):
        StopRequest(shared.run.folder).make()
        wait_until(lambda: StopRequest(here.first.run_folder).is_made)
    assert shared.answer(0) is None
    shared.end.drop()
    shared.end.offer(shared.job.plan)
    PROCESS_COPY.remove()
    spoiled = replace(shared.job, plan=replace(shared.job.plan, digest="0" * 64))
    with (
        pytest.raises(ArtifactError, match="changed or damaged"),
        local_job(0, spoiled) as (here, publish),
        here.stop.make_on_error(),  # as `infer_on_ray` does
    ):
        infer_partition(0, here, publish)
    assert shared.store.has("stop"), "the others of the run need not go on"


def test_what_is_missing_damaged_or_another_is_named(
    shared: Shared, objects: ObjectServer, tiny_checkpoint: Any, tmp_path: Path
) -> None:
    for model, error in ((tiny_checkpoint("qwen2"), "differs from the one"), (tmp_path / "gone", "no such file")):
        elsewhere = replace(shared.job, model=str(model))
        with pytest.raises(ModelError, match=error), local_job(0, elsewhere):
            pass
    parts = shared.answer(0)
    place = f"nights/{Path(shared.run.folder).name}"
    stored = objects.objects[f"{place}/parts/part-00000.parquet"]
    objects.objects[f"{place}/parts/part-00000.parquet"] = {**stored, "content": stored["content"][:-8]}
    with pytest.raises(DamagedObjectError, match=r"parts/part-00000\.parquet does not have the sha256"):
        shared.end.find(parts)
    shared.end.drop()
    with pytest.raises(ArtifactError, match=r"jupyter://nights/.*/parts/part-00000\.parquet is missing"):
        shared.end.find(parts)
    PROCESS_COPY.remove()
    with pytest.raises(ArtifactError, match=r"plan\.parquet is missing"), local_job(0, shared.job):
        pass


def test_a_worker_that_cannot_write_its_copy_names_its_folder_and_not_the_store(
    shared: Shared, temporary_folder: Path
) -> None:
    place = f"on {re.escape(platform.node())}: {temporary_folder}/.*/plan.tmp cannot be written: "
    began = time.monotonic()
    with files_of_at_most(0), pytest.raises(ArtifactError, match=rf"^{place}File too large; [\d,]+ bytes free in"):
        shared.answer(0)
    local = ObjectStore(f"file://{temporary_folder.parent}/objects")
    local.make_folders([""])
    local.put_file("plan.parquet", shared.job.plan.path)
    with pytest.raises(ArtifactError, match=f"^{place}No such file or directory$"):
        local.get_file("plan.parquet", temporary_folder / "gone" / "plan.tmp")
    assert time.monotonic() - began < PATIENCE_SECONDS


def test_a_store_that_cannot_be_used_is_named_and_secrets_are_not_repeated(
    nights: Any,
    prefect_server: str,
    objects: ObjectServer,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tasks.runs.object_store.PATIENCE_SECONDS", 0.0)
    command = [*nights.inputs, "--workload", "ranking"]
    night = partial(run_flow, nightly)
    for secret in ("sftp://me:hunter2@host/nights", "simplecache::sftp://me:hunter2@host/", "http://host/?sig=hunter2"):
        assert night([*command, "--exchange", secret]) == 2
        error = capfd.readouterr().err
        assert "credentials belong into the environment" in error
        assert "hunter2" not in error
    with pytest.raises(ValueError, match="exchange") as refused:
        WorkerSettings(exchange="sftp://me:hunter2@host/nights")
    assert "hunter2" not in str(refused.value)
    assert night([*command, "--exchange", "nights"]) == 2
    assert "must be a URL such as s3://bucket/folder" in capfd.readouterr().err
    assert night([*command, "--exchange", "memory://nights"]) == 2
    assert "must be a place that workers see" in capfd.readouterr().err
    assert night([*command, "--exchange", "tape://nights"]) == 1
    said = capfd.readouterr()
    assert "nightly: exchange 'tape://nights' cannot be used: Protocol not known: tape" in said.err
    assert "rows to answer" not in said.out
    assert night([*command, "--exchange", f"file://{nights.path}/nights"]) == 1
    said = capfd.readouterr()
    assert f"nightly: file://{nights.path}/nights/ cannot be reached: NotADirectoryError: " in said.err
    assert "rows to answer" not in said.out
    objects.is_write_only = True
    assert night([*command, "--exchange", "jupyter://nights"]) == 1
    said = capfd.readouterr()
    assert "cannot be reached: HTTPError: 403" in said.err
    assert "rows to answer" not in said.out
    objects.is_write_only = False
    objects.num_refusals = 10**6
    assert night([*command, "--exchange", "jupyter://nights"]) == 1
    assert "cannot be reached: HTTPError: 503" in capfd.readouterr().err
    assert nights.sql("select count(*) from runs") == [(0,)]


@pytest.mark.skipif(find_spec("s3fs") is not None, reason="s3fs is installed")
def test_a_store_whose_package_is_not_installed_names_it() -> None:
    with pytest.raises(ConfigError, match="Install s3fs to access S3"):
        ObjectStore("s3://bucket/nights")


def test_a_worker_that_cannot_start_is_an_error_although_the_store_has_an_attempt(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/objects"
    job = make_job(tmp_path, load_workload("snippets"), tmp_path, exchange=url)
    store = ObjectStore(url)
    store.make_folders(["attempts"])
    store.put("attempts/starts-00000", b"")  # emptied by the process that tried the partition
    give_up = Timer(60, job.stop.make)
    give_up.start()
    pool = WorkerPool([{"PYTHONHASHSEED": "no number"}])
    with closing(pool), pytest.raises(WorkerError, match="partition 0: 4 processes in a row ended before"):
        pool.answer(0, job)
    give_up.cancel()
