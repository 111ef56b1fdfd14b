"""The process of a temporary Prefect server: `temporary_server.py PARENT_PID FD` serves on an inherited socket.

It is started by path and imports nothing of this project, so it runs in any working directory.
"""

import ctypes
import fcntl
import gc
import logging
import os
import re
import signal
import socket
import sys
from contextlib import ExitStack, suppress
from typing import Any

PR_SET_PDEATHSIG = 1

LOGGED: set[str] = set()
"""Errors that the server has logged."""


def make_record(*given: Any, **named: Any) -> logging.LogRecord:
    """A log record with its error as one line, or below all levels if the same error was logged before: the server's
    tracebacks, hundreds of lines on a full disk, would hide the line of the run that says what fails."""
    record = logging.LogRecord(*given, **named)
    text = record.getMessage()
    if record.exc_info and (error := record.exc_info[1]) is not None:
        text, record.exc_info = f"{text.strip()} {type(error).__name__}: {error}", None
    text = re.sub(r".*^Traceback \(most recent call last\):\n(?: [^\n]*\n)*", "", text, flags=re.MULTILINE | re.DOTALL)
    record.msg, record.args = text.strip().partition("\n")[0], ()
    if found := re.search(r"\w+(Error|Exception): .*", record.msg):
        record.levelno = -1 if found[0] in LOGGED else record.levelno
        LOGGED.add(found[0])
    return record


if __name__ == "__main__":
    parent_pid, listener_fd = map(int, sys.argv[1:])
    # The kernel ends this process when its parent ends, even if the parent is killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("the parent ended before its server began")
    if "PREFECT_LOGGING_LEVEL" not in os.environ:
        logging.setLogRecordFactory(make_record)

    gc.disable()  # garbage collection takes a fifth of the imports' time and finds nothing
    import uvicorn
    from prefect.server.api.server import create_app
    from prefect.settings import PREFECT_HOME

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            """One server after the other: two that migrate the same database at once fail."""
            with ExitStack() as held:
                with suppress(OSError):  # the folder is not there, or its file system locks no folders
                    home = os.open(PREFECT_HOME.value(), os.O_RDONLY)
                    held.callback(os.close, home)
                    fcntl.flock(home, fcntl.LOCK_EX)
                await super().startup(sockets)

    gc.freeze()
    gc.enable()
    config = uvicorn.Config(create_app, factory=True, log_level="error", lifespan="on", timeout_graceful_shutdown=2)
    Server(config).run(sockets=[socket.socket(fileno=listener_fd)])
