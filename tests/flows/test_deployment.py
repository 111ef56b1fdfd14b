"""prefect.yaml: what it deploys, its form, and a run of it by a real server and worker."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.flows import load_flow_from_entrypoint
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.utilities.callables import parameter_schema

from flows.explain import explain
from flows.nightly import nightly
from tests.flows.distributed.worker_watch import find_processes, wait_until

ROOT = Path(__file__).parents[2]
PREFECT = (sys.executable, "-m", "prefect")
WORKER = (*PREFECT, "worker", "start", "--pool", "batchloom", "--limit", "1")


@pytest.fixture
def deployments() -> dict[str, dict[str, Any]]:
    found = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    return {deployment["name"]: deployment for deployment in found}


def test_deployments_are_the_flows_with_parameters_they_take(deployments: dict[str, dict[str, Any]]) -> None:
    assert list(deployments) == ["nightly", "explain"]
    for name, deployment in deployments.items():
        flow = load_flow_from_entrypoint(deployment["entrypoint"])
        assert flow.name == name
        flow.validate_parameters(deployment["parameters"])
    of_file = load_flow_from_entrypoint("flows/nights/night.py:night")  # as docs/operating.md says
    assert of_file.validate_parameters({"file": "night.toml"})["file"] == Path("night.toml")
    (schedule,) = deployments["nightly"]["schedules"]
    assert schedule["cron"].split()[2:] == ["*", "*", "*"], "every night"
    assert "schedules" not in deployments["explain"], "it is asked, not awaited"


@pytest.mark.parametrize("flow", [nightly, explain], ids=["nightly", "explain"])
def test_the_form_asks_for_each_parameter_with_its_type_and_meaning(flow: Flow[..., Any]) -> None:
    schema = parameter_schema(flow).model_dump_for_openapi()
    assert sorted(schema["required"]) == ["database", "model"]
    for name, parameter in schema["properties"].items():
        assert parameter["description"], name
        settings = schema["definitions"][parameter["$ref"].split("/")[-1]]["properties"] if "$ref" in parameter else {}
        for field, meaning in (settings or {name: parameter}).items():
            assert meaning["description"], field
            assert {"type", "anyOf"} & meaning.keys(), field
    assert schema["properties"]["workloads"]["items"] == {"type": "string"}
    assert schema["definitions"]["PlanSettings"]["properties"]["method"]["enum"] == ["exact", "paper", "none"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the server and of logs."""
    return tmp_path_factory.mktemp("deployment")


@pytest.fixture(scope="module")
def server(folder: Path, prefect_database: Path) -> Iterator[dict[str, str]]:
    """A Prefect server on loopback with a database of its own; gives the environment of its clients."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_LOCAL_STORAGE_PATH"}
    environment |= {"PREFECT_HOME": str(folder / "prefect"), "PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
    environment |= {"PREFECT_WORKER_QUERY_SECONDS": "1", "PREFECT_DEPLOYMENT_CONCURRENCY_SLOT_WAIT_SECONDS": "1"}
    command = [*PREFECT, "server", "start", "--host", "127.0.0.1", "--port", str(port), "--no-ui"]
    (folder / "prefect").mkdir()
    shutil.copyfile(prefect_database, folder / "prefect" / "prefect.db")
    with in_background(command, environment, folder / "server.log"):
        deadline = time.monotonic() + 240
        while not is_healthy(environment["PREFECT_API_URL"]):
            assert time.monotonic() < deadline, (folder / "server.log").read_text()
            time.sleep(0.2)
        yield environment


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextmanager
def in_background(
    command: Sequence[str], environment: dict[str, str], log: Path
) -> "Iterator[subprocess.Popen[bytes]]":
    """A process for the length of the block, ended as Ctrl-C would."""
    with open(log, "wb") as stream:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=stream, stderr=stream, start_new_session=True
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def prefect(server: dict[str, str], folder: Path) -> Callable[..., str]:
    """Runs a command of Prefect's, gives what it prints; pool and deployments are there."""
    (folder / "worker.log").touch()

    def run(*arguments: str, timeout_seconds: float = 600) -> str:
        done = subprocess.run(
            [*PREFECT, *arguments], cwd=ROOT, env=server, capture_output=True, text=True, timeout=timeout_seconds
        )
        assert done.returncode == 0, done.stdout + done.stderr + (folder / "worker.log").read_text()
        return done.stdout

    post(server["PREFECT_API_URL"], "work_pools/", name="batchloom", type="process")
    run("--no-prompt", "deploy", "--all")
    return run


@pytest.mark.slow
def test_a_worker_runs_the_deployment(
    nights: Any, server: dict[str, str], prefect: Callable[..., str], folder: Path
) -> None:
    parameters = {
        "database": str(nights.path),
        "model": str(nights.model),
        "engine": {"dtype": "float32", "kv_memory": "8MiB"},
    }
    ask = partial(post, server["PREFECT_API_URL"])
    scheduled = {"state": {"type": {"any_": ["SCHEDULED"]}}}
    deadline = time.monotonic() + 240
    while not (tonight := ask("flow_runs/filter", flow_runs=scheduled, sort="EXPECTED_START_TIME_ASC")):
        assert time.monotonic() < deadline, "the schedule makes no runs"
        time.sleep(0.3)
    assert all(run["auto_scheduled"] and run["expected_start_time"][11:19] == "02:00:00" for run in tonight)
    assert len(tonight) >= 2, "one a night"
    with in_background(WORKER, server, folder / "worker.log"):
        order_night(ask, parameters | {"workloads": ["ranking"]})
        prefect("deployment", "run", "nightly/nightly", "--watch", "--params", json.dumps(parameters))
        # What the schedule made for 2:00 is due now. Its database is that of prefect.yaml, which is not there.
        due = {
            "state": {"type": "SCHEDULED", "state_details": {"scheduled_time": "2026-01-01T02:00:00Z"}},
            "force": True,
        }
        ask(f"flow_runs/{tonight[0]['id']}/set_state", **due)
        deadline = time.monotonic() + 240
        scheduled = {"id": {"any_": [tonight[0]["id"]]}}
        while (fired := ask("flow_runs/filter", flow_runs=scheduled)[0])["state_type"] != "FAILED":
            assert time.monotonic() < deadline, (folder / "worker.log").read_text()
            time.sleep(0.3)
    assert nights.sql("select workload, status, num_rows, num_ok from runs order by started_at") == [
        ("ranking", "completed", 6, 6),
        ("snippets", "completed", 12, 12),
        ("ranking", "completed", 0, 0),
    ]
    assert "leaked" not in (folder / "worker.log").read_text(), "DuckDB's report of objects still alive"
    storage = folder / "prefect" / "storage"
    assert list(storage.iterdir())
    assert storage.stat().st_mode & 0o077 == 0
    assert "no database at nightly.duckdb" in fired["state"]["message"]

    first, second = find_runs(ask, nights.path)
    messages = [log["message"] for log in ask("logs/filter", logs={"flow_run_id": {"any_": [second["id"]]}})]
    assert any(message.startswith("snippets: completed: 12 rows answered") for message in messages), messages
    assert (first["name"], second["name"]) == ("nightly-team", "nightly-team")
    assert first["tags"] == second["tags"] == ["batchloom"]
    assert first["end_time"] <= second["start_time"], "one after the other"
    artifacts = ask("artifacts/filter", artifacts={"flow_run_id": {"any_": [second["id"]]}})
    shown = {artifact["key"]: artifact for artifact in artifacts}
    assert shown.keys() == {"progress-snippets", "report-snippets", "numbers-snippets", "nightly-runs"}
    assert shown["progress-snippets"]["data"] == 100.0
    rows = [(row["workload"], row["answered"], row["left"]) for row in json.loads(shown["nightly-runs"]["data"])]
    assert rows == [("snippets", 12, 0), ("ranking", 0, 0)]
    (report,) = nights.runs.glob("*snippets*/report.html")
    assert report.as_uri() in shown["report-snippets"]["data"]


@pytest.mark.slow
@pytest.mark.usefixtures("prefect")
def test_a_night_outlives_its_worker_and_when_it_is_killed_too_the_next_one_ends_it(
    nights: Any, server: dict[str, str], folder: Path
) -> None:
    nights.add_towers(28)  # enough that it still runs when its worker is found dead
    parameters = {
        "database": str(nights.path),
        "model": str(nights.model),
        "workloads": ["snippets"],
        "engine": {"dtype": "float32", "kv_memory": "8MiB", "max_num_batched_tokens": 128, "num_threads": 1},
        "planning": {"partition_tokens": 400},
    }
    ask = partial(post, server["PREFECT_API_URL"])

    def count_parts() -> int:
        return len([*nights.runs.glob("*/parts/part-*")])

    with in_background(WORKER, server, folder / "worker.log") as worker:
        order_night(ask, parameters)
        wait_until(count_parts, 240)
        worker.kill()
        worker.wait()
    num_parts = count_parts()
    (night,) = find_runs(ask, nights.path)
    flow_processes = find_processes(f"PREFECT__FLOW_RUN_ID={night['id']}")
    assert flow_processes
    wait_until(lambda: count_parts() > num_parts)  # without its worker
    for process in flow_processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    assert nights.sql("select count(*) from runs") == [(0,)], "it was killed in the middle"
    # Else the server takes it for running, until the slot of the deployment is taken from it after five minutes.
    ask(f"flow_runs/{night['id']}/set_state", state={"type": "CRASHED"}, force=True)

    with in_background(WORKER, server, folder / "worker.log"):
        order_night(ask, parameters)
        wait_until(lambda: [run["state_type"] for run in find_runs(ask, nights.path)][1:] == ["COMPLETED"], 600, 0.3)
        ((status, num_ok), (rest_status, num_rest)) = nights.sql("select status, num_ok from runs order by started_at")
        assert (status, rest_status, num_ok + num_rest) == ("interrupted", "completed", 96)
        assert num_ok > 0
        once = "select count(*), count(distinct (doc_id, query_id)), count(error) from snippets"
        assert nights.sql(once) == [(96, 96, 0)]
    answers = nights.answers()
    with temporary_settings({PREFECT_API_URL: server["PREFECT_API_URL"]}):
        nights.run("snippets", full=True)
        # Else Prefect tells a minute later, in another test, that it cannot send the night's log: the server has ended.
        APILogWorker.drain_all(timeout=10)
    assert nights.answers() == answers, "those of an undisturbed night"


def order_night(ask: Callable[..., Any], parameters: dict[str, Any]) -> None:
    """As the server's page does it."""
    (deployment,) = ask("deployments/filter", deployments={"name": {"any_": ["nightly"]}})
    ask(f"deployments/{deployment['id']}/create_flow_run", parameters=parameters)


def find_runs(ask: Callable[..., Any], database: Path) -> list[dict[str, Any]]:
    """The flow runs that have answered this database, in the order of their starts."""
    runs = ask("flow_runs/filter", flow_runs={"start_time": {"is_null_": False}}, sort="START_TIME_ASC")
    return [run for run in runs if run["parameters"]["database"] == str(database)]


def post(url: str, path: str, **body: Any) -> Any:
    """A server whose database is busy says 503; Prefect's own client asks again, too."""
    request = urllib.request.Request(f"{url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    deadline = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code != 503 or time.monotonic() > deadline:
                raise
            time.sleep(0.5)
