"""A process that has imported everything and loaded the model, and forks a child for each order: nights become cheap.

Orders come as lines of JSON on standard input. For each, the child's process id goes to standard output, then, when it
has ended, its exit status (minus the number of the signal that killed it). Keys of an order:

    arguments   of the nightly command line; of batchloom's own, where they begin with the name of a command; or
    infer       partition and job, for the task alone
    output      file for what the child writes to standard output and error
    calls       file that gets a line for each fsync or replace: number, name, inode of what is safe from then on
    kill        number of the call at which the child kills itself, and "before" or "after" it
    poison      token id: the child, or a process that it starts, kills itself when the model is about to compute it
    file_bytes  limit of the operating system on the size of a file
    num_steps   of the engine, after which the night's deadline comes
    num_spares  of worker processes that are forks, too; further ones are started as always
"""

import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

from engine.config import EngineConfig
from engine.model.loading.checkpoint import checkpoint_digest, resolve_checkpoint
from flows.cli import batchloom
from flows.command.run_flow import run_flow
from flows.nightly import nightly
from tasks.forecast.hardware import choose_hardware
from tasks.infer import infer
from tasks.partitions.engine_host import PROCESS_HOST
from tasks.runs.infer_job import FailurePolicy, InferJob, JobMember, StopRequest
from tasks.storage.artifact import ArtifactRef
from tasks.workers import worker_pool, worker_process
from tasks.workers.engine_team import EngineTeam
from tasks.workloads.workload import load_workload
from tests.sources import make_job

LATE_IMPORTS = (
    *("prefect.flow_engine", "prefect.task_engine", "prefect.utilities.visualization"),
    *("anyio._backends._asyncio", "fastapi", "numpy.ma", "pyarrow.dataset"),
    *("engine.encoding.encoder_engine", "flows.in_time", "flows.nights.together", "flows.proof"),
)
"""Modules that a night imports."""

KEPT = (("tasks.report_page.page", "_template"), ("tasks.database.schema", "_shipped_relations"))
"""Functions that compute once in a process what each night needs."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def watch_calls(path: str, kill: tuple[int, str] | None) -> None:
    """Number the calls that make files durable, and kill the process at the given one."""
    calls = Path(path)
    calls.write_text("")
    number = 0

    def watch(name: str) -> None:
        original = getattr(os, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            nonlocal number
            number += 1
            if kill == (number, "before"):
                die()
            inode = os.stat(arguments[0]).st_ino
            result = original(*arguments, **options)
            with calls.open("a") as file:
                file.write(f"{number} {name} {inode}\n")
            if kill == (number, "after"):
                die()
            return result

        setattr(os, name, watched)

    watch("fsync")
    watch("replace")


def end_after(num_steps: int) -> None:
    """Let the deadline come after `num_steps` steps."""
    steps, has_time = iter(range(num_steps)), StopRequest.has_time

    def has_time_yet(stop: StopRequest, step_seconds: float) -> bool:
        return has_time(stop, step_seconds if next(steps, None) is not None else 1e9)

    StopRequest.has_time = has_time_yet  # type: ignore[method-assign]


class Spare(ForkProcess):
    """A worker process that has imported everything, and waits until a night takes it. It ends with the night."""

    def __init__(self, lines: list[socket.socket]) -> None:
        """Fork it.

        Args:
            lines: to other spares; closed in this one, so that they see the end of the night.
        """
        super().__init__()
        self.line, self._theirs = socket.socketpair()
        self._nights_ends = [*lines, self.line]
        self.start()
        self._theirs.close()

    def run(self) -> None:
        os.setsid()
        for line in self._nights_ends:
            line.close()
        try:
            with Connection(os.dup(self._theirs.fileno())) as line:
                os.environ.update(line.recv())
        except EOFError:
            return
        sys.argv[1:] = [str(self._theirs.detach())]
        worker_process.main()

    def take(self, environment: Mapping[str, str]) -> socket.socket:
        with Connection(os.dup(self.line.fileno())) as line:
            line.send({**os.environ, **environment})
        return self.line

    def wait(self, timeout: float | None = None) -> int:
        """As `Popen.wait`."""
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired("worker_process", timeout or 0)
        return self.exitcode


def keep_spares(num_spares: int) -> None:
    """Fork them while this process has one thread; the night's worker pools take them first."""
    spares: list[Spare] = []
    for _ in range(num_spares):
        spares.append(Spare([spare.line for spare in spares]))
    start_child = worker_pool.start_child

    def take_or_start(module: str, *, environment: Mapping[str, str]) -> tuple[socket.socket, Any]:
        if not spares:
            return start_child(module, environment=environment)
        spare = spares.pop()
        return spare.take(environment), spare

    worker_pool.start_child = take_or_start  # type: ignore[assignment]


def work(order: dict[str, Any]) -> int:
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if "poison" in order:
        os.environ["BATCHLOOM_TEST_POISON"] = str(order["poison"])
        sys.path.insert(0, str(Path(__file__).with_name("poison")))
        sys.modules.pop("sitecustomize", None)  # some Pythons bring one
        import_module("sitecustomize")
    if "num_spares" in order:
        keep_spares(order["num_spares"])
    if "calls" in order:
        watch_calls(order["calls"], tuple(order["kill"]) if "kill" in order else None)
    if "file_bytes" in order:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_bytes"],) * 2)
    if "num_steps" in order:
        end_after(order["num_steps"])
    if "infer" in order:
        partition, job = order["infer"]
        (member,) = job["members"]
        member |= {"workload": load_workload(member["workload"]["source"]), "run_folder": Path(member["run_folder"])}
        job |= {"plan": ArtifactRef(**job["plan"]), "members": (JobMember(**member),)}
        job |= {"engine": EngineConfig(**job["engine"]), "failures": FailurePolicy(**job["failures"])}
        infer.fn(partition, InferJob(**job))
        return 0
    if order["arguments"][0].startswith("--"):
        return run_flow(nightly, order["arguments"])
    return batchloom(order["arguments"])


def serve(model: Path) -> None:
    checkpoint = resolve_checkpoint(model)
    config = EngineConfig(dtype="float32", kv_memory_bytes=8 << 20, max_num_batched_tokens=128, num_threads=1)
    for name in LATE_IMPORTS:
        import_module(name)
    for module, name in KEPT:
        getattr(import_module(module), name)()
    choose_hardware(checkpoint, EngineTeam(engine=config), "cpu")  # measures once for all nights with a deadline
    digest = checkpoint_digest(checkpoint)
    with PROCESS_HOST.use(make_job("", load_workload("snippets"), checkpoint, model_digest=digest, engine=config)):
        pass
    gc.freeze()  # children collect garbage only among their own objects
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = work(order)
            finally:
                os._exit(code)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):  # as with a server of the night's own
        serve(Path(sys.argv[1]))
