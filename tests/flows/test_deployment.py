"""prefect.yaml: what it deploys, its form, and a run of it by a real server and worker."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema

from flows.nightly import nightly

ROOT = Path(__file__).parents[2]
PREFECT = (sys.executable, "-m", "prefect")


@pytest.fixture
def deployment() -> dict[str, Any]:
    (found,) = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    return dict(found)


def test_the_deployment_is_the_flow_with_parameters_it_takes(deployment: dict[str, Any]) -> None:
    flow = load_flow_from_entrypoint(deployment["entrypoint"])
    assert (flow.name, deployment["name"]) == ("nightly", "nightly")
    flow.validate_parameters(deployment["parameters"])
    (schedule,) = deployment["schedules"]
    assert schedule["cron"].split()[2:] == ["*", "*", "*"], "every night"


def test_the_form_asks_for_each_parameter_with_its_type_and_meaning() -> None:
    schema = parameter_schema(nightly).model_dump_for_openapi()
    assert sorted(schema["required"]) == ["database", "model"]
    for name, parameter in schema["properties"].items():
        assert parameter["description"], name
        settings = schema["definitions"][parameter["$ref"].split("/")[-1]]["properties"] if "$ref" in parameter else {}
        for field, meaning in (settings or {name: parameter}).items():
            assert meaning["description"], field
            assert {"type", "anyOf"} & meaning.keys(), field
    assert schema["properties"]["workloads"]["items"] == {"type": "string"}
    assert schema["definitions"]["PlanSettings"]["properties"]["method"]["enum"] == ["exact", "paper"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A Prefect server on loopback with a database of its own; gives the environment of its clients."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_LOCAL_STORAGE_PATH"}
    environment |= {"PREFECT_HOME": str(tmp_path / "prefect"), "PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
    command = [*PREFECT, "server", "start", "--host", "127.0.0.1", "--port", str(port), "--no-ui"]
    with in_background(command, environment, tmp_path / "server.log"):
        deadline = time.monotonic() + 90
        while not is_healthy(environment["PREFECT_API_URL"]):
            assert time.monotonic() < deadline, (tmp_path / "server.log").read_text()
            time.sleep(0.2)
        yield environment


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextmanager
def in_background(command: list[str], environment: dict[str, str], log: Path) -> Iterator[None]:
    """A process for the length of the block, ended as Ctrl-C would."""
    with open(log, "wb") as stream:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=stream, stderr=stream, start_new_session=True
        )
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.slow
def test_a_worker_runs_the_deployment(nights: Any, server: dict[str, str], tmp_path: Path) -> None:
    def prefect(*arguments: str) -> str:
        done = subprocess.run(
            [*PREFECT, *arguments], cwd=ROOT, env=server, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "worker.log").read_text()
        return done.stdout

    (tmp_path / "worker.log").touch()
    prefect("work-pool", "create", "batchloom", "--type", "process")
    prefect("deploy", "--all")
    parameters = {
        "database": str(nights.path),
        "model": str(nights.model),
        "engine": {"dtype": "float32", "kv_memory": "8MiB"},
    }
    worker = [*PREFECT, "worker", "start", "--pool", "batchloom", "--limit", "1"]
    with in_background(worker, server, tmp_path / "worker.log"):
        prefect("deployment", "run", "nightly/nightly", "--watch", "--params", json.dumps(parameters))
    assert nights.sql("select workload, status, num_ok from runs order by workload") == [
        ("ranking", "completed", 6),
        ("snippets", "completed", 12),
    ]
    storage = tmp_path / "prefect" / "storage"
    assert list(storage.iterdir())
    assert storage.stat().st_mode & 0o077 == 0
    request = urllib.request.Request(
        f"{server['PREFECT_API_URL']}/logs/filter", b"{}", {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        messages = [log["message"] for log in json.load(answer)]
    assert any(message.startswith("snippets: completed: 12 rows answered") for message in messages), messages
