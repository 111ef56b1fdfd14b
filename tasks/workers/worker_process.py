"""A process that answers partitions for its parent, with one engine.

It ends when its parent ends, even in the middle of a step: finished answers are on disk.
"""

import logging
import signal
import sys
import traceback
from multiprocessing.connection import Connection

from engine.child_process import end_with_parent
from engine.errors import BatchloomError, ConfigError, DeviceError, WorkerError
from tasks.partitions.attempt import infer_partition
from tasks.runs.run_exchange import local_job
from tasks.runs.worker_copy import PROCESS_COPY

LOGGER = logging.getLogger("batchloom")


class LineHandler(logging.Handler):
    """Sends log lines to the parent, which shows them."""

    def __init__(self, line: Connection) -> None:
        super().__init__()
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        self._line.send(("log", (record.levelno, "%s", record.getMessage())))


def serve(line: Connection) -> None:
    """Answer partitions one after the other, until the parent closes the line."""
    while True:
        try:
            partition, job = line.recv()
        except (EOFError, ConnectionError):
            return
        try:
            with local_job(partition, job) as (here, upload_file):
                parts = infer_partition(partition, here, upload_file)
            line.send(("parts", parts))
        except Exception as error:
            _send_error(line, find_cause(error, job.engine.device))


def find_cause(error: Exception, device: str) -> Exception:
    """The error, or a `DeviceError` if the device is its reason, as where a GPU fails while the model is loaded.

    Args:
        error: why a partition was not answered.
        device: as in the engine's settings; "cuda" where the run found a GPU for this process.
    """
    import torch

    from tasks.partitions.failing import judge_failure

    if isinstance(error, ConfigError) and device == "cuda" and not torch.cuda.is_available():
        return DeviceError(f"the device fails: {error}")
    if not isinstance(error, (BatchloomError, OSError)):
        try:
            judge_failure(error)
        except DeviceError as cause:
            return cause
    return error


def _send_error(line: Connection, error: Exception) -> None:
    error.add_note(traceback.format_exc())  # pickling drops the traceback
    try:
        line.send(("error", error))
    except ConnectionError:
        return
    except Exception:  # an error that cannot be pickled
        line.send(("error", WorkerError(f"{type(error).__name__}: {error}")))


def main() -> None:
    """Serve the parent process; the argument is the file descriptor of the line to it."""
    # A service manager sends SIGTERM to all processes of a job. The parent turns it into a stop request.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    line = Connection(int(sys.argv[1]))
    end_with_parent(line.fileno(), PROCESS_COPY.remove)
    LOGGER.addHandler(LineHandler(line))
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
    serve(line)


if __name__ == "__main__":
    main()
