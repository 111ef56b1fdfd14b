"""A night on a Ray cluster: one on this machine, bound to loopback, with CPU engines standing for GPUs."""

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from flows.settings import FailureSettings, WorkerSettings

# Ray reads them when it is imported. The first binds it to loopback, on Linux, too.
os.environ.update(
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
    RAY_AUTH_MODE="token",
    RAY_AUTH_TOKEN=secrets.token_hex(32),
    RAY_USAGE_STATS_ENABLED="0",
)
pytest.importorskip("prefect_ray", reason="prefect-ray is not installed: batchloom[ray]")

ROOT = Path(__file__).parents[2]
PORT = 6391


@pytest.fixture(scope="module")
def cluster(prefect_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster with two cores."""
    head = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={PORT}"]
    limits = ["--num-cpus=2", "--include-dashboard=false", "--object-store-memory=80000000"]
    log = tmp_path_factory.mktemp("ray") / "log"
    with open(log, "wb") as output:
        process = subprocess.Popen([*head, *limits], stdout=output, stderr=output, start_new_session=True, cwd="/")
    try:
        deadline = time.monotonic() + 60
        while b"runtime started" not in log.read_bytes():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield f"127.0.0.1:{PORT}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # told to end, it takes half a minute
        process.wait(30)


def find_ray_workers() -> list[int]:
    """Process ids of the workers that answer a partition."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if title.startswith(b"ray::infer"):
            found.append(int(folder.name))
    return found


def test_a_cluster_answers_as_one_process_does_and_survives_the_death_of_a_worker(nights: Any, cluster: str) -> None:
    nights.run("snippets", partition_tokens=1)
    undisturbed = nights.answers()
    killed: list[int] = []

    def kill() -> None:
        while not [*nights.runs.glob("*/attempts/part-*")]:
            time.sleep(0.005)
        killed.extend(find_ray_workers()[:1])
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    on_ray = WorkerSettings(runner="ray", ray_address=cluster)
    at_once = FailureSettings(retry_delay_seconds=0.01)
    snippets, ranking = nights.run(full=True, machines=on_ray, partition_tokens=1, failures=at_once)
    killer.join()
    assert len(killed) == 1
    assert (snippets.num_ok, snippets.num_errors, ranking.num_ok) == (12, 0, 6)
    assert nights.answers() == undisturbed


def test_a_cluster_that_is_not_there_is_named(nights: Any, prefect_server: str) -> None:
    with pytest.raises(ConfigError, match=r"no Ray cluster at 127\.0\.0\.1:6399"):
        nights.run("snippets", machines=WorkerSettings(runner="ray", ray_address="127.0.0.1:6399"))
