"""The run's end of an exchange: its plan goes into a store, and what workers elsewhere finish comes into its folder."""

import logging
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from engine.errors import ArtifactError, BatchloomError
from tasks.runs.infer_job import Exchange
from tasks.runs.object_store import DamagedObjectError, ObjectStore
from tasks.runs.stop_request import LOOK_SECONDS, StopRequest
from tasks.storage.artifact import ArtifactRef, open_parquet, replace_file

LOGGER = logging.getLogger("batchloom")

PLAN = "plan.parquet"
STOP = "stop"
STATE_FOLDERS = ("steps", "parts", "attempts")
"""What says how far a partition is. Steps come first: where a part is, its steps are, too."""

FOLDERS = (*STATE_FOLDERS, "engines", "progress")
"""Of a run folder, what workers write."""

TAKE_SECONDS = 3.0
"""Between two looks at the store."""

FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class SharedRun:
    """A run folder and its counterpart in a store; the folder's file ``exchange`` names it, for who comes later.

    Args:
        url: of the counterpart.
    Raises:
        ConfigError, ArtifactError: as `ObjectStore`.
    """

    __slots__ = ("_folder", "_seen", "_store")

    def __init__(self, folder: str | Path, url: str) -> None:
        self._folder = Path(folder)
        self._store = ObjectStore(url)
        self._seen: dict[str, str] = {}

    def offer(self, plan: ArtifactRef) -> None:
        """Put what all workers need; `ArtifactError` where the store does not take it."""
        with replace_file(_note(self._folder)) as file:
            file.write(self._store.url.encode())
        self._store.make_folders(FOLDERS)
        self._store.put_file(PLAN, plan.path)

    def take(self, folders: Sequence[str] = FOLDERS) -> None:
        """Bring what is new in the store into the run folder; what is not whole yet comes at a later time.

        Raises:
            ArtifactError: the store cannot be reached, or the run folder cannot be written.
        """
        for folder in folders:
            for name, version in self._store.list(folder).items():
                path = f"{folder}/{name}"
                if FILE_NAME.fullmatch(name) and self._seen.get(path) != version:
                    try:
                        self._fetch(path)
                    except DamagedObjectError:
                        continue
                    self._seen[path] = version

    def find(self, parts: Sequence[ArtifactRef]) -> list[ArtifactRef]:
        """The run folder's own copies of parts that workers made.

        Raises:
            ArtifactError: one is not in the store, or not as it was made; the message says which.
        """
        return [self._find(replace(part, path=str(self._folder / "parts" / Path(part.path).name))) for part in parts]

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Pass on a stop request, and `take` now and then, for the length of the block and once at its end."""
        has_ended = threading.Event()
        thread = threading.Thread(target=self._keep_taking, args=(has_ended,), daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            _end(thread, has_ended)
            with _lenient(self._store.url):
                self.take()
            raise
        _end(thread, has_ended)
        self.take()

    def drop(self) -> None:
        """Delete the counterpart; `ArtifactError` where that cannot be."""
        self._store.delete()
        _note(self._folder).unlink(missing_ok=True)

    def _keep_taking(self, has_ended: threading.Event) -> None:
        stop, has_told, num_looks = StopRequest(self._folder), False, 0
        while not has_ended.wait(LOOK_SECONDS):
            with _lenient(self._store.url):  # the end of the run is for the main thread to judge
                num_looks += 1
                if stop.is_made and not has_told:
                    self._store.put(STOP, b"")
                    has_told = True
                if num_looks % round(TAKE_SECONDS / LOOK_SECONDS) == 0:
                    self.take()

    def _find(self, part: ArtifactRef) -> ArtifactRef:
        try:
            open_parquet(part).close()
        except ArtifactError:
            self._fetch(f"parts/{Path(part.path).name}")
            open_parquet(part).close()
        return part

    def _fetch(self, path: str) -> None:
        content = self._store.get(path)
        target = self._folder / path
        target.parent.mkdir(mode=0o700, exist_ok=True)
        with replace_file(target) as file:
            file.write(content)


def name_exchange(url: str, run_folder: str | Path, model: str) -> Exchange:
    """The exchange of a run below the URL that the user gave; a local model gets its absolute path."""
    path = Path(model).expanduser()
    return Exchange(
        url=f"{url.rstrip('/')}/{Path(run_folder).name}", model=str(path.absolute()) if path.exists() else model
    )


def recover_shared_run(folder: str | Path) -> None:
    """Take what workers finished for a run that died; where the store is away, what it holds is answered again."""
    if url := _read_note(folder):
        with _lenient(url):
            SharedRun(folder, url).take(STATE_FOLDERS)


def drop_shared_run(folder: str | Path) -> None:
    """Delete what a run has in a store, if it has anything there. Where the store is away it stays, and is named."""
    if url := _read_note(folder):
        with _lenient(url):
            SharedRun(folder, url).drop()


def _note(folder: str | Path) -> Path:
    return Path(folder) / "exchange"


def _read_note(folder: str | Path) -> str:
    try:
        return _note(folder).read_text()
    except OSError:
        return ""


def _end(thread: threading.Thread, has_ended: threading.Event) -> None:
    has_ended.set()
    thread.join()


@contextmanager
def _lenient(url: str) -> Iterator[None]:
    """An error of the store is a warning."""
    try:
        yield
    except BatchloomError as error:
        LOGGER.warning("exchange %s: %s", url, error)
