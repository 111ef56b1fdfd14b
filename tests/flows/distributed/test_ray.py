"""Nights on a Ray cluster: one on this machine, bound to loopback, with CPU engines standing for GPUs."""

import inspect
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.runner import Runner

from engine.config import EngineConfig
from engine.errors import ConfigError
from flows.quality.compare import compare
from flows.ray_cluster import STOP_SECONDS, RayCluster, worker_options
from flows.settings import EngineSettings, WorkerSettings
from flows.workers import Workers
from tasks.recover import STOP_LOCK_TIMEOUT_SECONDS
from tasks.runs.infer_job import FailurePolicy
from tests.flows.conftest import ENGINE
from tests.flows.distributed.worker_watch import find_processes, meanwhile, wait_until
from tests.flows.test_recovery import begin_job

# Ray reads them when it is imported. The first binds it to loopback, on Linux, too.
os.environ.update(
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
    RAY_AUTH_MODE="token",
    RAY_AUTH_TOKEN=secrets.token_hex(32),
    RAY_USAGE_STATS_ENABLED="0",
)
pytest.importorskip("prefect_ray", reason="prefect-ray is not installed: pip install '.[ray]'")

ROOT = Path(__file__).parents[3]
CLUSTER = {"BATCHLOOM_TEST_CLUSTER": secrets.token_hex(8)}
"""In the environment of every process of our cluster, and of no other."""


def find_free_ports(num_ports: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(num_ports)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@pytest.fixture(scope="module")
def cluster(prefect_server: str) -> Iterator[str]:
    """The address of a cluster with two cores."""
    port, client_port, agent_port = find_free_ports(3)
    ports = [f"--port={port}", f"--ray-client-server-port={client_port}", f"--dashboard-agent-listen-port={agent_port}"]
    limits = ["--num-cpus=2", "--include-dashboard=false", "--object-store-memory=80000000"]
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:  # short, for its sockets
        log = Path(folder) / "log"
        head = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--temp-dir={folder}"]
        with open(log, "wb") as output:
            process = subprocess.Popen(
                [*head, *ports, *limits],
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd="/",
                env={**os.environ, **CLUSTER, "TMPDIR": folder},
            )
        try:
            deadline = time.monotonic() + 240
            while b"runtime started" not in log.read_bytes():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            yield f"127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # told to end, they take half a minute
            for member in find_cluster(b""):
                with suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
            process.wait(60)


def find_cluster(title: bytes) -> list[int]:
    """Process ids of our cluster, of processes whose command line begins like this."""
    ((name, value),) = CLUSTER.items()
    return [process for process in find_processes(f"{name}={value}") if read_title(process).startswith(title)]


def read_title(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def find_ray_workers() -> list[int]:
    """The processes that answer a partition."""
    return find_cluster(b"ray::infer")


@pytest.mark.slow
def test_a_cluster_answers_as_one_process_does_and_survives_the_death_of_a_worker(nights: Any, cluster: str) -> None:
    nights.run("snippets", partition_tokens=1)
    undisturbed = nights.answers()
    killed: list[int] = []

    def kill() -> None:
        """Kill within a partition: an attempt has begun, its part does not exist yet."""
        wait_until(lambda: [*nights.runs.glob("*/attempts/part-*")], pause_seconds=0.002)
        (victim, *_) = wait_until(find_ray_workers, pause_seconds=0.002)
        os.kill(victim, signal.SIGKILL)
        killed.append(victim)

    on_ray = WorkerSettings(runner="ray", ray_address=cluster)
    at_once = FailurePolicy(retry_delay_seconds=0.01)
    with meanwhile(kill):
        snippets, ranking = nights.run(full=True, machines=on_ray, partition_tokens=1, failures=at_once)
    assert len(killed) == 1
    assert (snippets.num_ok, snippets.num_errors, ranking.num_ok) == (12, 0, 6)
    assert nights.answers() == undisturbed


@pytest.mark.slow
def test_samples_and_comparisons_are_where_other_hosts_of_a_cluster_see_them(nights: Any, cluster: str) -> None:
    """They share the folder of the database, and no other."""
    on_ray = WorkerSettings(runner="ray", ray_address=cluster)
    with meanwhile(lambda: wait_until(lambda: [*nights.runs.glob("*-snippets-*/attempts/*")], pause_seconds=0.002)):
        assert nights.run("snippets", sample=2, machines=on_ray) == []
    how = {"engine": ENGINE, "machines": on_ray, "sample": 2}
    with meanwhile(lambda: wait_until(lambda: [*nights.runs.glob("*-compare-*/*/attempts/*")], pause_seconds=0.002)):
        found = compare(nights.path, str(nights.model), ("snippets", "snippets"), **how)
    assert (len(found.rows), found.changed) == (2, ())
    assert {path.name for path in nights.runs.iterdir()} == {"cache", "lock"}


def test_a_stopped_run_writes_its_answers_before_prefect_kills_it() -> None:
    seconds = inspect.signature(Runner._kill_process).parameters["grace_seconds"].default
    assert seconds > STOP_SECONDS + STOP_LOCK_TIMEOUT_SECONDS


@pytest.mark.slow
def test_a_cluster_says_for_how_many_engines_it_has_room(cluster: str) -> None:
    with closing(Workers(WorkerSettings(runner="ray", ray_address=cluster))) as workers:
        team = workers.team(EngineConfig(device="cpu", num_threads=1))
    assert (team.num_engines, team.num_on_host) == (2, 2)


@pytest.mark.slow
def test_a_cluster_that_shares_no_folder_is_stopped_and_the_next_night_goes_on(
    nights: Any, cluster: str, prefect_server: str, tmp_path: Path
) -> None:
    nights.add_towers(16)
    store = tmp_path / "store"
    inputs = [*nights.inputs, "--workload", "snippets", "--partition-tokens", "1"]
    options = ["--dtype", "float32", "--kv-memory", "8MiB", "--max-num-batched-tokens", "128"]
    on_ray = ["--runner", "ray", "--ray-address", cluster, "--exchange", store.as_uri()]
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_LOCAL_STORAGE_PATH"}
    with open(tmp_path / "log", "wb") as log:
        night = subprocess.Popen(
            [sys.executable, "-m", "flows.nightly", *inputs, *options, *on_ray],
            cwd=ROOT,
            env={**environment, "PREFECT_API_URL": prefect_server},
            start_new_session=True,
            stdout=log,
            stderr=log,
        )
    try:
        wait_until(lambda: [*store.glob("*/parts/*")] or night.poll() is not None, pause_seconds=0.002)
        night.terminate()
        assert night.wait(240) == 143, (tmp_path / "log").read_text()
    finally:
        night.kill()
        night.wait()
    assert find_ray_workers() == []
    assert [*store.iterdir()] == []
    ((status, num_ok, num_unanswered),) = nights.sql("select status, num_ok, num_unanswered from runs")
    assert (status, num_ok + num_unanswered) == ("interrupted", 60)
    assert 0 < num_ok < 60
    (rest,) = nights.run("snippets")
    assert (rest.num_ok, rest.num_already_done) == (num_unanswered, num_ok)


@pytest.mark.slow
def test_a_run_stopped_while_partitions_are_handed_out_waits_for_those_that_a_worker_has(
    nights: Any, cluster: str, tmp_path: Path
) -> None:
    job = begin_job(nights, tmp_path)

    def order() -> Iterator[int]:
        yield 0
        wait_until(lambda: [*job.first.run_folder.glob("attempts/part-*")], pause_seconds=0.002)
        raise KeyboardInterrupt

    def hand_out() -> None:
        ray_cluster = RayCluster(cluster)
        with ExitStack() as at_end:
            at_end.callback(ray_cluster.leave)
            at_end.enter_context(ray_cluster.submit(job, order()))  # type: ignore[arg-type]

    with pytest.raises(KeyboardInterrupt):
        flow(name="hand_out", persist_result=False)(hand_out)()
    assert job.stop.is_made
    assert (job.first.run_folder / "steps" / "part-00000.parquet").exists()


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1:{port}", "Connection refused"),
        ("east", "Invalid address"),
    ],
)
@pytest.mark.usefixtures("prefect_server")
def test_a_cluster_that_is_not_there_is_named_before_any_work(nights: Any, address: str, reason: str) -> None:
    (port,) = find_free_ports(1)
    address = address.format(port=port)
    with pytest.raises(
        ConfigError, match=rf"no Ray cluster at {re.escape(address)}, which ray_address names: .*{reason}"
    ):
        nights.run("snippets", machines=WorkerSettings(runner="ray", ray_address=address))
    assert not list(nights.runs.glob("*-*")), "no run was begun"


def test_a_cluster_that_asks_for_a_token_says_how_to_show_it(cluster: str) -> None:
    script = f"from flows.ray_cluster import join_cluster\nwith join_cluster({cluster!r}): pass"
    silent = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    tried = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=silent, capture_output=True, text=True)
    last = tried.stderr.splitlines()[-1]
    assert last.startswith(f"engine.errors.ConfigError: no Ray cluster at {cluster}, which ray_address names: "), last
    assert last.endswith("; if it asks for a token, set RAY_AUTH_MODE=token"), last


@pytest.mark.slow
def test_an_engine_that_a_cluster_cannot_hold_is_refused_before_any_work(nights: Any, cluster: str) -> None:
    on_ray = WorkerSettings(runner="ray", ray_address=cluster)
    with pytest.raises(ConfigError, match="a Ray cluster gives each worker one: set runner to local"):
        nights.run("snippets", machines=on_ray, engine=EngineSettings(tensor_parallel_size=2))
    assert not list(nights.runs.glob("*-*")), "no run was begun"


def test_a_second_gpu_for_prompts_is_refused_on_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be another worker's."""
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 2.0, "CPU": 4.0})
    monkeypatch.setattr(ray, "nodes", list)
    with pytest.raises(ConfigError, match="disaggregation 'processes' computes prompts on a second GPU"):
        worker_options(EngineConfig(disaggregation="processes"))
    assert worker_options(EngineConfig())["num_gpus"] == 1
    assert "num_cpus" in worker_options(EngineConfig(device="cpu", disaggregation="processes"))
