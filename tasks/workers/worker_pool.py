"""The processes of one host that answer partitions, each with an engine of its own."""

import logging
from collections.abc import Mapping, Sequence
from queue import SimpleQueue

from tasks.partitions.attempt_log import AttemptLog
from tasks.partitions.worker_name import WORKER_VARIABLE
from tasks.runs.infer_job import InferJob
from tasks.runs.shared_run import SharedRun
from tasks.runs.stop_request import StopRequest
from tasks.storage.artifact import ArtifactRef
from tasks.workers.worker_client import WorkerClient, WorkerDiedError

LOGGER = logging.getLogger("batchloom")


class WorkerPool:
    """As many processes as environments, started when they are first needed and kept until `close`.

    Args:
        environments: of each process, variables besides ours: which device it sees.
    """

    __slots__ = ("_free", "_num_workers")

    def __init__(self, environments: Sequence[Mapping[str, str]]) -> None:
        self._num_workers = len(environments)
        self._free: SimpleQueue[_Seat] = SimpleQueue()
        for number, environment in enumerate(environments):
            self._free.put(_Seat({**environment, WORKER_VARIABLE: str(number)}))

    def answer(self, partition: int, job: InferJob) -> list[ArtifactRef] | None:
        """As `tasks.infer.infer`, in a process that is free; waits for one.

        A process that ends meanwhile is replaced, and the new one goes on with the partition: its attempts are noted in
        the run folder, so that rows which end each process that tries them are found like others that fail.

        Raises what `infer` raises, and `WorkerError` where one process after the other ends before it tries a row.
        """
        seat = self._free.get()
        try:
            while True:
                AttemptLog(job.run_folder, partition).note_start()
                try:
                    return seat.take().answer(partition, job)
                except WorkerDiedError as error:
                    seat.clear()
                    if StopRequest(job.run_folder).is_made:
                        return None
                    if job.exchange is not None:  # which attempts there were says whether to hand it out again
                        SharedRun(job.run_folder, job.exchange.url).take(("attempts",))
                    LOGGER.warning("partition %d is handed out again: its %s", partition, error)
        finally:
            self._free.put(seat)

    def close(self) -> None:
        """End the processes; none may have a partition any more."""
        for _ in range(self._num_workers):
            self._free.get().clear()


class _Seat:
    """The place of one process."""

    __slots__ = ("_environment", "_worker")

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._worker: WorkerClient | None = None

    def take(self) -> WorkerClient:
        if self._worker is None:
            self._worker = WorkerClient(self._environment)
        return self._worker

    def clear(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = None
