"""How a run is asked to end early: a file in its folder, seen by every worker wherever it runs."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOOK_SECONDS = 0.2


class StopRequest:
    """The file ``stop`` of a run folder. Workers look for it after each step of the engine."""

    __slots__ = ("_path",)

    def __init__(self, run_folder: str | Path) -> None:
        self._path = Path(run_folder) / "stop"

    @property
    def is_made(self) -> bool:
        return self._path.exists()

    def wait(self, seconds: float) -> bool:
        """Sleep so long, or until a request is made; returns whether one is."""
        deadline = time.monotonic() + seconds
        while not self.is_made and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, LOOK_SECONDS))
        return self.is_made

    def make(self) -> None:
        """Ask the workers to end; what they have finished stays."""
        self._path.touch(mode=0o600)

    @contextmanager
    def make_on_error(self) -> Iterator[None]:
        """Ask the workers to end if the block does not come through."""
        try:
            yield
        except BaseException:
            self.make()
            raise
