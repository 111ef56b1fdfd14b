"""A pool of processes of this host that answer partitions, each with an engine of its own."""

import logging
import math
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from queue import LifoQueue
from typing import TYPE_CHECKING, Any

from engine.child_process import start_child
from engine.errors import DeviceError
from tasks.partitions.partition_work import WORKER_VARIABLE, AttemptLog, PartitionWork
from tasks.runs.infer_job import InferJob, StopRequest
from tasks.storage.artifact import ArtifactRef
from tasks.workers.starts import note_start

if TYPE_CHECKING:
    from tasks.runs.run_exchange import RunExchange

LOGGER = logging.getLogger("batchloom")

CLOSE_SECONDS = 5.0
"""How long an idle process may take to end by itself."""

STOP_SECONDS = 120.0
"""How long a process may go on without a message after a request to stop, before it counts as hung: longer than a step.
A kernel that never returns keeps an engine from looking at the clock."""


class WorkerPool:
    """A process for each environment, started when it is first needed and kept until `close`. An environment has
    variables to add to ours, such as the device that the process sees."""

    def __init__(self, environments: Sequence[Mapping[str, str]]) -> None:
        self._num_workers = len(environments)
        self._free: LifoQueue[_Worker] = LifoQueue()  # so that a small workload finds an engine with its model loaded
        self._failed: list[tuple[_Worker, Path]] = []
        self._lock = threading.Lock()
        self._exchanges: dict[str, RunExchange] = {}  # by URL; kept, because each takes a change once
        for number, environment in enumerate(environments):
            self._free.put(_Worker({**environment, WORKER_VARIABLE: str(number)}))

    def answer(self, partition: int, job: InferJob) -> list[ArtifactRef] | None:
        """As `tasks.infer.infer`, in the next free process. A process that dies is replaced, and the new one continues
        with the partition, except after the deadline: then the finished parts are returned. Attempts are noted in the
        run folder, so that rows which crash the process are found like other failing rows. Where a device fails, the
        partition goes to the next free process, and that device is left alone until the next run, which starts a new
        process on it. Raises what `infer` raises, `DeviceError` only if it is the last device, and `WorkerError` if
        several processes in a row die before they try a row."""
        worker = self._take(job)
        try:
            with job.stop.make_on_error():  # before the process is free: it would begin the next partition
                while True:
                    note_start(AttemptLog(job.first.run_folder, partition))
                    try:
                        return worker.answer(partition, job)
                    except (DeviceError, _WorkerDiedError) as error:
                        worker.close()
                        if isinstance(error, DeviceError):
                            if not self._leave_alone(worker, job):
                                raise
                            LOGGER.warning("one engine less until the run ends, %s: %s", worker.title, error)
                            worker = self._take(job)
                        is_overdue = job.stop.is_overdue
                        if job.stop.is_made:
                            LOGGER.warning("partition %d is not finished: %s", partition, error)
                            if not is_overdue:
                                return None
                        if job.exchange:  # `note_start` needs the attempts that the process noted
                            from tasks.runs.run_exchange import STATE_FOLDERS, RunExchange

                            folders = STATE_FOLDERS if is_overdue else ("attempts",)
                            exchange = RunExchange(job.first.run_folder, job.exchange)
                            self._exchanges.setdefault(job.exchange, exchange).take(folders)
                        if is_overdue:
                            return PartitionWork(partition, job, lambda path: None).parts
                        LOGGER.warning("partition %d is handed out again: %s", partition, error)
        finally:
            self._free.put(worker)

    def close(self) -> None:
        """End the processes; call it when all are free."""
        for _ in range(self._num_workers - len(self._failed)):
            self._free.get().close()

    def _take(self, job: InferJob) -> "_Worker":
        """The next free worker, one whose device failed in an earlier run included."""
        with self._lock:
            for worker, folder in [each for each in self._failed if each[1] != job.first.run_folder]:
                self._failed.remove((worker, folder))
                self._free.put(worker)
        return self._free.get()

    def _leave_alone(self, worker: "_Worker", job: InferJob) -> bool:
        """Take a worker whose device has failed out of the run; False if it is the last one."""
        with self._lock:
            if len(self._failed) == self._num_workers - 1:
                return False
            self._failed.append((worker, job.first.run_folder))
            return True


class _WorkerDiedError(Exception):
    """The process died while it had a partition; the message says how."""


class _Worker:
    """A process of `tasks.workers.worker_process`, replaced if it dies; its model stays loaded between partitions."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.title = ", ".join(f"{name}={value}" for name, value in environment.items())
        self._line: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def answer(self, partition: int, job: InferJob) -> list[ArtifactRef] | None:
        """As `tasks.infer.infer`, in the process; its log lines and its errors become ours. Raises `_WorkerDiedError`
        if the process died, or hangs after a request to stop; files that it has written stay."""
        if self._line is None or self._process is None:
            line, self._process = start_child("tasks.workers.worker_process", environment=self._environment)
            self._line = Connection(line.detach())
        try:
            self._line.send((partition, job))
            while (answer := _receive(self._line, job.stop))[0] == "log":
                LOGGER.log(*answer[1])
        except (EOFError, OSError) as error:
            raise _WorkerDiedError(f"its process {self._process.pid} {_describe_end(self._process)}") from error
        kind, value = answer
        if kind == "error":
            raise value
        parts: list[ArtifactRef] | None = value
        return parts

    def close(self) -> None:
        """End the process, if there is one; kill it if it does not end by itself."""
        if self._line is not None and self._process is not None:
            self._line.close()
            try:
                self._process.wait(CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                with suppress(subprocess.TimeoutExpired):  # a driver may hold it for ever
                    self._process.wait(CLOSE_SECONDS)
        self._line = self._process = None


def _receive(line: Connection, stop: StopRequest) -> Any:
    """The next message of a process. Raises `TimeoutError` if it hangs, see `STOP_SECONDS`."""
    stopped_at = math.inf
    while not line.poll(1.0):
        if stop.is_made:
            stopped_at = min(stopped_at, time.monotonic())
        if time.monotonic() - stopped_at > STOP_SECONDS:
            raise TimeoutError
    return line.recv()


def _describe_end(process: "subprocess.Popen[bytes]") -> str:
    try:
        code = process.wait(CLOSE_SECONDS)
    except subprocess.TimeoutExpired:
        return "does not answer any more"
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
