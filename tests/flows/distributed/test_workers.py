"""Several engines on one host: real processes, killed and stopped in the middle of their partitions."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ArtifactError, CapacityError, ConfigError, DeviceError, FailureRateError, WorkerError
from flows.command.run_flow import run_flow
from flows.nightly import nightly
from flows.settings import WorkerSettings
from tasks.runs.infer_job import FailurePolicy
from tasks.storage.artifact import ArtifactRef, write_parquet
from tasks.storage.plan_file import read_partition
from tasks.workers.engine_team import EngineTeam, lay_out_workers
from tasks.workers.infer_remote import name_device
from tasks.workers.worker_pool import WorkerPool
from tasks.workloads.workload import load_workload
from tests.flows.distributed.worker_watch import find_workers, hold_worker, meanwhile, wait_until
from tests.flows.test_recovery import begin_job
from tests.sources import make_job

ROOT = Path(__file__).parents[3]
TWO = WorkerSettings(workers=2)
AT_ONCE = FailurePolicy(retry_delay_seconds=0.01)
STEPS = "select partition, step, num_prefix_tokens, num_suffix_tokens, num_decode_tokens from steps where run_id = ?"


@pytest.mark.usefixtures("prefect_server")
def test_two_engines_give_the_answers_of_one_and_survive_the_death_of_a_worker(
    nights: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (alone,) = nights.run("snippets", partition_tokens=1)
    undisturbed, steps_alone = nights.answers(), sorted(nights.sql(STEPS, [alone.run_id]))
    killed: list[int] = []

    def kill() -> None:
        """Kill within a partition: an attempt has begun, its part does not exist yet."""
        started = wait_until(lambda: [*nights.runs.glob("*/attempts/part-*")], pause_seconds=0.002)
        (victim, *_) = find_workers(os.getpid())
        os.kill(victim, signal.SIGKILL)
        killed.append(victim)
        assert started

    with caplog.at_level(logging.INFO, "batchloom"), meanwhile(kill):
        snippets, ranking = nights.run(full=True, machines=TWO, partition_tokens=1, failures=AT_ONCE)
    assert (snippets.num_ok, snippets.num_errors, ranking.num_ok) == (12, 0, 6)
    assert nights.answers() == undisturbed
    (again,) = [message for message in caplog.messages if "is handed out again" in message]
    assert again.endswith(f"its process {killed[0]} was ended by signal 9")
    steps = nights.sql(STEPS, [snippets.run_id])
    assert len({step[:2] for step in steps}) == len(steps)
    assert {step[0] for step in steps} == {step[0] for step in steps_alone}
    assert find_workers(os.getpid()) == [], "they end with the night"
    ((machines,),) = nights.sql("select config->'machines' from runs where run_id = ?", [snippets.run_id])
    assert json.loads(machines) == {"workers": 2, "runner": "local", "ray_address": "auto", "exchange": ""}


def start_night(nights: Any, prefect_server: str) -> "subprocess.Popen[bytes]":
    """Start the command line with two workers in its own process group; returns when both work."""
    options = ["--dtype", "float32", "--kv-memory", "8MiB", "--max-num-batched-tokens", "128"]
    inputs = [*nights.inputs, "--workload", "snippets", "--partition-tokens", "400"]
    night = subprocess.Popen(
        [sys.executable, "-m", "flows.nightly", *inputs, *options, "--workers", "2"],
        cwd=ROOT,
        env={**os.environ, "PREFECT_API_URL": prefect_server},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    num_before = len([*nights.runs.glob("*/steps/part-*")])

    def is_at_work() -> bool:
        assert night.poll() is None
        return len([*nights.runs.glob("*/steps/part-*")]) > num_before and len(find_workers(night.pid)) == 2

    wait_until(is_at_work)
    return night


@pytest.mark.slow
def test_workers_end_with_the_night_however_it_ends(nights: Any, prefect_server: str) -> None:
    nights.add_towers(24)
    interrupted = start_night(nights, prefect_server)
    interrupted.send_signal(signal.SIGSTOP)  # else it might end while its processes are looked for
    workers = find_workers(interrupted.pid)
    os.killpg(interrupted.pid, signal.SIGINT)
    interrupted.send_signal(signal.SIGCONT)
    assert interrupted.wait(60) == 130
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    ((status, num_ok, num_unanswered),) = nights.sql("select status, num_ok, num_unanswered from runs")
    assert (status, num_ok + num_unanswered) == ("interrupted", 84)
    assert 0 < num_ok < 84

    killed = start_night(nights, prefect_server)
    workers = find_workers(killed.pid)
    killed.kill()
    killed.wait()
    wait_until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers), 10.0)

    (rest,) = nights.run("snippets")
    assert num_ok <= rest.num_already_done < 84
    assert nights.sql("select count(*), count(distinct (doc_id, query_id)), count(error) from snippets") == [
        (84, 84, 0)
    ]


def test_what_a_worker_raises_is_raised_here_and_one_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    plan = ArtifactRef(path=str(tmp_path / "none.parquet"), num_rows=1, digest="")
    job = make_job(tmp_path, load_workload("snippets"), tmp_path, plan=plan)
    sound, broken = WorkerPool([{}]), WorkerPool([{"PYTHONHASHSEED": "no number"}])
    with closing(sound), pytest.raises(ArtifactError, match=r"none\.parquet cannot be read"):
        sound.answer(0, job)
    (tmp_path / "stop").unlink()
    with closing(broken), pytest.raises(WorkerError, match="partition 1: 4 processes in a row ended before"):
        broken.answer(1, job)


def test_workloads_of_one_partition_use_one_engine_of_several(tmp_path: Path) -> None:
    """Before, each loaded the model on the next one."""
    plan = ArtifactRef(path=str(tmp_path / "none.parquet"), num_rows=1, digest="")
    with closing(WorkerPool([{}, {}])) as pool:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            job = make_job(tmp_path / name, load_workload("snippets"), tmp_path, plan=plan)
            with pytest.raises(ArtifactError, match=r"none\.parquet cannot be read"):
                pool.answer(0, job)
        assert len(find_workers(os.getpid())) == 1


def test_an_engine_whose_device_has_failed_gets_a_new_process(
    nights: Any, tmp_path: Path, prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The night goes on with its other workloads."""
    job = begin_job(nights, tmp_path)
    (fault := tmp_path / "fault").touch()
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "flows" / "poison"))
    with closing(WorkerPool([{"BATCHLOOM_TEST_FAULT": str(fault)}])) as pool:
        with pytest.raises(DeviceError, match="the device fails: AcceleratorError: CUDA error: an illegal memory"):
            pool.answer(0, job)
        (job.first.run_folder / "stop").unlink()
        (part,) = pool.answer(0, job) or []
    assert part.num_rows == 12


@pytest.mark.usefixtures("prefect_server")
def test_a_device_that_fails_leaves_its_rows_to_the_others(
    nights: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its attempt does not count against the rows: without retries they would be split and become errors."""
    (fault := tmp_path / "fault").touch()
    monkeypatch.setenv("BATCHLOOM_TEST_FAULT", str(fault))
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "flows" / "poison"))
    (summary,) = nights.run("snippets", machines=TWO, partition_tokens=1, failures=FailurePolicy(retries=0))
    assert not fault.exists()
    assert (summary.num_rows, summary.num_ok) == (12, 12)
    assert nights.sql("select count(*), count(distinct (doc_id, query_id)) from snippets") == [(12, 12)]
    (fewer,) = [message for message in caplog.messages if "one engine less until the run ends" in message]
    assert re.search("ends, BATCHLOOM_WORKER=[01]: the device fails: AcceleratorError: CUDA error: an illegal", fewer)
    assert len(nights.sql("select distinct worker from steps")) == 1


def test_the_last_device_that_fails_ends_the_run_and_the_next_run_tries_all_again(
    nights: Any, tmp_path: Path, prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they are gone before the model is loaded: the process finds no GPU, and uses no CPU in its place."""
    job = begin_job(nights, tmp_path)
    with closing(WorkerPool([{}, {}])) as pool:
        for folder in (job.first.run_folder, tmp_path):
            member = replace(job.first, run_folder=folder)
            failing = replace(job, members=(member,), engine=replace(job.engine, device="cuda"))
            with pytest.raises(DeviceError, match="the device fails: device 'cuda': torch finds no GPU here"):
                pool.answer(0, failing)
            assert failing.stop.is_made
            assert (folder / "attempts" / "starts-00000").stat().st_size == 2, "both were tried"


@pytest.mark.slow
def test_an_installation_in_which_every_row_ends_its_process_is_not_tried_row_by_row(
    nights: Any, tmp_path: Path, prefect_server: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    policy = FailurePolicy(retries=0, error_rate_rows=3)
    job = replace(begin_job(nights, tmp_path), failures=policy)
    poison = {"BATCHLOOM_TEST_POISON": str(read_partition(job.plan, 0).prompts[0][0])}
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "flows" / "poison"))
    message = r"^3 of 3 rows failed, max_error_rate allows 50%: the process that tried it ended each time \(3 rows\)"
    with closing(WorkerPool([poison])) as pool, pytest.raises(FailureRateError, match=message):
        pool.answer(0, job)
    assert caplog.text.count("is handed out again") == 3 + 3, "as many attempts as the sample has rows, then the sample"


@pytest.mark.parametrize("is_killed", [True, False])
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_worker_that_dies_or_hangs_after_the_deadline_leaves_the_finished_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stopped: bool, is_killed: bool
) -> None:
    """Only where somebody asked to stop, there are none. A stopped process stands for a kernel that never returns."""
    monkeypatch.setattr("tasks.workers.worker_pool.STOP_SECONDS", 300.0 if is_killed else 0.5)
    rows = pa.record_batch({"row_id": [3, 4], "error": pa.array([None, "too long"], pa.string())})
    (tmp_path / "parts").mkdir()
    part = write_parquet(tmp_path / "parts" / "part-00000.parquet", rows.schema, [rows])
    deadline = None if is_stopped else time.time() + 0.5
    job = make_job(tmp_path, load_workload("snippets"), tmp_path, deadline=deadline)

    def has_ended() -> bool:
        if is_stopped:
            job.stop.make()
        return job.stop.is_made

    with closing(WorkerPool([{}])) as pool, meanwhile(partial(hold_worker, has_ended, is_killed=is_killed)):
        assert pool.answer(0, job) == (None if is_stopped else [part])


def test_engines_of_a_host_divide_what_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)))
    config = EngineConfig(device="cpu", kv_memory_bytes=64 << 20, num_threads=4)
    assert lay_out_workers("auto", config) == EngineTeam(environments=({},), engine=config)
    both = lay_out_workers(2, config)
    assert both.environments == ({}, {})
    assert (both.engine.kv_memory_bytes, both.engine.num_threads) == (32 << 20, 2)
    assert lay_out_workers(2, replace(config, num_threads=9999)).engine.num_threads == 2, "of the cores that there are"
    by_share = lay_out_workers(2, EngineConfig(device="cpu", memory_fraction=0.5)).engine
    assert (by_share.memory_fraction, by_share.kv_memory_bytes) == (0.25, "auto")
    assert by_share.num_threads == max(1, torch.get_num_threads() // 2)
    with pytest.raises(ConfigError, match="2 workers need a GPU each, and device is 'cuda:1'"):
        lay_out_workers(2, replace(config, device="cuda:1"))
    assert lay_out_workers("auto", replace(config, device="cuda:1")).environments == ({},)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for visible, expected in ((None, ("0", "1")), ("3, GPU-5a", ("3", "GPU-5a"))):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        layout = lay_out_workers("auto", EngineConfig(num_threads=3))
        assert layout.environments == tuple({"CUDA_VISIBLE_DEVICES": gpu} for gpu in expected)
        assert layout.engine == EngineConfig(num_threads=3, device="cuda"), "memory of its own; no CPU in its place"
    with pytest.raises(ConfigError, match="3 workers need a GPU each, and 2 are visible"):
        lay_out_workers(3, EngineConfig())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for visible in ("MIG-1a, MIG-2b", "MIG-GPU-5a/1/0,MIG-GPU-5a/2/0", "MIG-1a"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        names = [name.strip() for name in visible.split(",")] if "," in visible else []
        expected = tuple({"CUDA_VISIBLE_DEVICES": name} for name in names) or ({},)
        assert lay_out_workers("auto", EngineConfig()).environments == expected
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    spread = lay_out_workers("auto", EngineConfig(tensor_parallel_size=2))
    assert spread.environments == ({"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"})
    with pytest.raises(ConfigError, match=r"3 workers need 2 GPUs \(tensor_parallel_size\) each, and 4 are visible"):
        lay_out_workers(3, EngineConfig(tensor_parallel_size=2))
    assert [name_device("3", None), name_device("GPU-5a", "3, GPU-5a")] == ["cuda:3", "cuda:1"]


def test_workers_that_the_host_has_no_room_for_are_refused_before_any_row_is_read(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = EngineConfig(device="cpu", kv_memory_bytes=64 << 10)
    WorkerSettings(workers=2).check_host(small, tiny_llama)
    with pytest.raises(CapacityError, match="a KV budget of 1024 bytes holds no request"):
        WorkerSettings(workers=64).check_host(small, tiny_llama)
    with pytest.raises(ConfigError, match="ray_address 'head:6379' is for runner ray, and runner is local"):
        WorkerSettings(ray_address="head:6379").check_host(small, tiny_llama)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match="3 workers need a GPU each, and 2 are visible"):
        WorkerSettings(workers=3).check_host(EngineConfig(), tiny_llama)


def test_a_cluster_decides_how_many_workers_it_has(nights: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_flow(nightly, [*nights.inputs, "--runner", "ray", "--workers", "2"]) == 2
    assert "leave workers at auto" in capfd.readouterr().err
