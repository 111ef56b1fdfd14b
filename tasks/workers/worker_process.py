"""A process that answers partitions for another one, which hands them out: one engine each, on a device of its own.

It ends with the other process, however that ends, in the middle of a step, too: whatever is worth keeping is on disk.
"""

import logging
import os
import select
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection

from engine.errors import WorkerError
from tasks.infer import infer_partition
from tasks.runs.run_copy import PROCESS_COPY, run_at_hand

LOGGER = logging.getLogger("batchloom")


class LineHandler(logging.Handler):
    """Log lines go to the process that hands out, which knows where they are to be shown."""

    def __init__(self, line: Connection) -> None:
        super().__init__()
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        self._line.send(("log", (record.levelno, "%s", record.getMessage())))


def serve(line: Connection) -> None:
    """Answer the partitions that come, one after the other, until the line is closed."""
    while True:
        try:
            partition, job = line.recv()
        except (EOFError, ConnectionError):
            return
        try:
            with run_at_hand(partition, job) as (here, publish):
                parts = infer_partition(partition, here, publish)
            line.send(("parts", parts))
        except Exception as error:
            _send_error(line, error)


def _send_error(line: Connection, error: Exception) -> None:
    error.add_note(traceback.format_exc())  # which does not travel otherwise
    try:
        line.send(("error", error))
    except ConnectionError:
        return
    except Exception:  # an error that cannot be pickled
        line.send(("error", WorkerError(f"{type(error).__name__}: {error}")))


def _end_with(line: Connection) -> None:
    """Waits until the other end is gone, then ends this process."""
    poll = select.poll()
    poll.register(line.fileno(), select.POLLRDHUP)
    poll.poll()
    PROCESS_COPY.remove()
    os._exit(0)


def main() -> None:
    """Serves the process that has started this one; the argument is the file descriptor of the line."""
    # A service manager tells all processes of a job to end. The one that hands out makes a stop request of it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    line = Connection(int(sys.argv[1]))
    threading.Thread(target=_end_with, args=(line,), daemon=True).start()
    LOGGER.addHandler(LineHandler(line))
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
    serve(line)


if __name__ == "__main__":
    main()
