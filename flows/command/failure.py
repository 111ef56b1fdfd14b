"""How a command ends, fails or is stopped: its exit codes, and the line that says why."""

import gc
import logging
import os
import re
import signal
import sys
import time
from contextlib import suppress
from typing import TextIO

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def fail(message: str, code: int) -> int:
    """Print why a command failed, as one line; returns the exit code."""
    with suppress(OSError):  # nobody reads it any more
        print(message, file=sys.stderr)
    return code


def interrupt(raised: list[float], *_: object) -> None:
    """Ctrl-C. Another one within ten seconds is ignored: it would keep the run from writing its answers."""
    if not raised or time.monotonic() - raised[-1] > 10:
        raised.append(time.monotonic())
        raise KeyboardInterrupt


def end(number: int, _: object) -> None:
    """SIGTERM or SIGHUP. System and shell may both send the latter when the terminal is gone: the second is ignored."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sys.exit(128 + number)


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes log lines to a stream. Those that cannot be written are lost: nobody reads them any more, or the disk is
    full."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


def describe_lost_server(error: Exception, what: str = "the Prefect server does not answer any more") -> str:
    """What happened to the server and why, without its URL's password; of a temporary one, where its database is."""
    from prefect.settings import PREFECT_HOME  # takes a second to import

    from flows.command.prefect_server import CONFIGURED_URL
    from tasks.database.messages import describe_free_space

    reason = " ".join(str(error).split()).partition(" For more information check:")[0].rstrip("- ")
    home, line = PREFECT_HOME.value(), re.sub(r"(?<=://)[^\s/]+@", "", f"{what}: {reason}")
    return line if CONFIGURED_URL else f"{line}; its database is in {home}{describe_free_space(home / 'prefect.db')}"


def end_quietly() -> None:
    """Skip the last garbage collection, which takes two seconds; hide reports of objects alive and of lost output."""
    gc.freeze()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
