"""The private folder of a worker process that cannot reach the run's own folder."""

import atexit
import threading
from contextlib import ExitStack
from pathlib import Path

from tasks.storage.scratch_folder import scratch_folder


class WorkerCopy:
    """The private folder of this process, for one run at a time; it is deleted with the process, however that ends."""

    def __init__(self) -> None:
        self._in_use = threading.Lock()
        self._held = ExitStack()
        self._url = ""
        self._folder: Path | None = None

    def open(self, url: str) -> Path:
        """The folder for this run, see `scratch_folder`; a folder for another run is deleted."""
        if self._folder is None or self._url != url:
            self.remove()
            self._url, self._folder = url, self._held.enter_context(scratch_folder("run"))
        return self._folder

    def remove(self) -> None:
        with self._in_use:  # two threads may call this when the process ends
            self._held.close()
            self._folder = None


PROCESS_COPY = WorkerCopy()
atexit.register(PROCESS_COPY.remove)
