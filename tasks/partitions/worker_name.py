"""What the step log calls an engine, to tell those of a run apart."""

import os
import platform

WORKER_VARIABLE = "BATCHLOOM_WORKER"
"""Set where a process has the place of another one that died: the name is that of the place."""


def worker_name() -> str:
    """Of the engine of this process: the place among the engines of its host, else host and process id."""
    return os.environ.get(WORKER_VARIABLE) or f"{platform.node()}:{os.getpid()}"
