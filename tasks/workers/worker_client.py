"""The near end of a process that answers partitions, see `tasks.workers.worker_process`."""

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection

from tasks.runs.infer_job import InferJob
from tasks.storage.artifact import ArtifactRef

LOGGER = logging.getLogger("batchloom")

CLOSE_SECONDS = 5.0
"""How long an idle process has to end by itself."""


class WorkerDiedError(Exception):
    """The process ended while it had a partition; the message says how."""


class WorkerClient:
    """Starts a process and gives it one partition at a time; its model stays loaded in between.

    Args:
        environment: variables that it has besides ours.
    """

    __slots__ = ("_line", "_process")

    def __init__(self, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._line = Connection(ours.detach())
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tasks.workers.worker_process", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
                start_new_session=True,  # an interrupt from the keyboard is for us to judge
            )

    @property
    def process_id(self) -> int:
        return self._process.pid

    def answer(self, partition: int, job: InferJob) -> list[ArtifactRef] | None:
        """As `tasks.infer.infer`, and raises what that raises, there; the process's log becomes ours.

        Raises:
            WorkerDiedError: the process ended. What it had made durable stays.
        """
        try:
            self._line.send((partition, job))
            while True:
                kind, value = self._line.recv()
                if kind != "log":
                    break
                LOGGER.log(*value)
        except (EOFError, OSError) as error:
            raise WorkerDiedError(f"process {self.process_id} {self._describe_end()}") from error
        if kind == "error":
            raise value
        parts: list[ArtifactRef] | None = value
        return parts

    def close(self) -> None:
        """End the process, at once where it does not do so by itself."""
        self._line.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _describe_end(self) -> str:
        try:
            code = self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            return "does not listen any more"
        return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
