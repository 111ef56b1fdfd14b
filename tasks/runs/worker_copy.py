"""The private folder of a worker process that cannot reach the run's own folder."""

import atexit
import fcntl
import os
import shutil
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

PREFIX = "batchloom-run-"
"""Prefix of the folders' names, in the folder for temporary files."""


class WorkerCopy:
    """The private folder of this process, for one run at a time; it is deleted with the process, however that ends."""

    def __init__(self) -> None:
        self._in_use = threading.Lock()
        self._url = ""
        self._folder: Path | None = None
        self._lock = -1

    def open(self, url: str) -> Path:
        """The folder for this run, readable by its owner alone (0700); a folder for another run is deleted."""
        if self._folder is None or self._url != url:
            self.remove()
            _sweep_copies()
            unlocked = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))
            self._lock = os.open(unlocked / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self._url, self._folder = url, unlocked.rename(unlocked.with_name(unlocked.name[1:]))
        return self._folder

    def remove(self) -> None:
        with self._in_use:  # two threads may call this when the process ends
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                os.close(self._lock)
            self._folder = None


PROCESS_COPY = WorkerCopy()
atexit.register(PROCESS_COPY.remove)


def _sweep_copies() -> None:
    """Delete the folders of killed processes, whose locks the kernel has released."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError), open(folder / "lock", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
