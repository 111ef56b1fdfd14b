"""A run's copy in an object store, for workers that do not see its folder.

The run puts its plan there and takes what workers finish into its folder (`RunExchange`). A worker has a private folder
with what it needs of the run (`run_at_hand`); what changes there goes to the store.
"""

import logging
import platform
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from engine.errors import ArtifactError, BatchloomError, ModelError
from engine.model.loading.checkpoint import checkpoint_digest, resolve_checkpoint
from tasks.runs.infer_job import LOOK_SECONDS, InferJob, StopRequest
from tasks.runs.object_store import DamagedObjectError, ObjectStore
from tasks.runs.worker_copy import PROCESS_COPY
from tasks.storage.artifact import ArtifactRef, open_parquet, replace_file

LOGGER = logging.getLogger("batchloom")

PLAN = "plan.parquet"
STOP = "stop"
STATE_FOLDERS = ("steps", "parts", "attempts")
"""What says how far a partition is. Steps come first: where a part is, its steps are, too."""

FOLDERS = (*STATE_FOLDERS, "engines", "progress")
"""Of a run folder, what workers write."""

LOOKS_PER_TAKE = 15
"""The run looks for a stop request each time, and into the store this seldom."""

WORKER_LOOK_SECONDS = 2.0
"""Between two looks of a worker for a stop request in the store."""

LOOKS_PER_SHOW = 3
"""Looks of a worker between two reports of its progress."""

FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Upload = Callable[[Path], None]
"""Told of each file that has changed and must outlive this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """How workers that do not see the run's folder come by their work, and hand it in.

    Attributes:
        url: of the run's folder in the store that all hosts reach, see `ObjectStore`.
        model: as the user named it; each host finds its own copy by it.
    """

    url: str
    model: str

    @classmethod
    def below(cls, url: str, run_folder: str | Path, model: str) -> "Exchange":
        """The exchange of a run.

        Args:
            url: that the user gave; the run has a folder below it.
            run_folder: gives that folder its name.
            model: as the user named it; a local model gets its absolute path.
        """
        path = Path(model).expanduser()
        model = str(path.absolute()) if path.exists() else model
        return cls(url=f"{url.rstrip('/')}/{Path(run_folder).name}", model=model)


class RunExchange:
    """The run's end. The folder's file ``exchange`` names the copy in the store, for a process that recovers the run.

    Args:
        url: of the copy.
    Raises:
        ConfigError, ArtifactError: as `ObjectStore`.
    """

    def __init__(self, folder: str | Path, url: str) -> None:
        self._folder = Path(folder)
        self._store = ObjectStore(url)
        self._seen: dict[str, str] = {}

    def offer(self, plan: ArtifactRef) -> None:
        """Put what all workers need; `ArtifactError` where the store does not take it."""
        with replace_file(self._folder / "exchange") as file:
            file.write(self._store.url.encode())
        self._store.make_folders(FOLDERS)
        self._store.put_file(PLAN, plan.path)

    def take(self, folders: Sequence[str] = FOLDERS) -> None:
        """Bring what is new in the store into the run folder; skip truncated objects until they are whole.

        Raises:
            ArtifactError: the store cannot be reached, or the run folder cannot be written.
        """
        for folder in folders:
            for name, version in self._store.list(folder).items():
                path = f"{folder}/{name}"
                if FILE_NAME.fullmatch(name) and self._seen.get(path) != version:
                    with suppress(DamagedObjectError):
                        _fetch(self._store, path, self._folder)
                        self._seen[path] = version

    def find(self, parts: Sequence[ArtifactRef]) -> list[ArtifactRef]:
        """The run folder's own copies of parts that workers made.

        Raises:
            ArtifactError: one is not in the store, or not as it was made; the message says which.
        """
        found = [replace(part, path=str(self._folder / "parts" / Path(part.path).name)) for part in parts]
        for part in found:
            try:
                open_parquet(part).close()
            except ArtifactError:
                _fetch(self._store, f"parts/{Path(part.path).name}", self._folder)
                open_parquet(part).close()
        return found

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Pass on a stop request, and `take` now and then, for the length of the block and once at its end."""
        stop, has_told = StopRequest(self._folder), False

        def look(num_looks: int) -> None:
            nonlocal has_told
            if stop.is_made and not has_told:
                self._store.put(STOP, b"")
                has_told = True
            if num_looks % LOOKS_PER_TAKE == 0:
                self.take()

        try:
            with _repeating(look, LOOK_SECONDS, self._store.url):
                yield
        except BaseException:
            with _warn_only(self._store.url):
                self.take()
            raise
        self.take()

    def drop(self) -> None:
        """Delete the copy; `ArtifactError` where that cannot be."""
        self._store.delete()
        (self._folder / "exchange").unlink(missing_ok=True)


def recover_exchange(folder: str | Path) -> None:
    """Take what workers finished for a run that died; where the store is away, what it holds is answered again."""
    _with_noted(folder, lambda exchange: exchange.take(STATE_FOLDERS))


def drop_exchange(folder: str | Path) -> None:
    """Delete a run's copy in a store, if it has one. Where the store is away the copy stays, and is named."""
    _with_noted(folder, RunExchange.drop)


@contextmanager
def run_at_hand(partition: int, job: InferJob) -> Iterator[tuple[InferJob, Upload]]:
    """The job as this process can do it, and what it must tell of its files.

    Where the run's folder is out of reach, the job's folder is a copy, with what other workers did of the partition.

    Raises:
        ArtifactError: the store cannot be reached, or what it holds is missing or damaged.
        ModelError: the model is not on this host, or is another one here.
        ConfigError: as `ObjectStore`.
    """
    if job.exchange is None:
        yield job, lambda path: None
        return
    store, folder = ObjectStore(job.exchange.url), PROCESS_COPY.open(job.exchange.url)
    plan = folder / PLAN
    if not plan.exists():  # the plan's digest is checked when it is read
        store.get_file(PLAN, temporary := plan.with_suffix(".tmp"))
        temporary.replace(plan)
    _fetch_partition(store, folder, partition)
    checkpoint = _find_checkpoint(job.exchange, job.model_digest)
    here = replace(job, run_folder=str(folder), plan=replace(job.plan, path=str(plan)), checkpoint=checkpoint)
    with _in_touch(store, folder):
        yield here, lambda path: _upload(store, path, folder)


def _fetch_partition(store: ObjectStore, folder: Path, partition: int) -> None:
    """Replace what the folder holds of another partition by the store's state of this one; skip truncated objects."""
    for name in (*STATE_FOLDERS, "progress"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(mode=0o700)
    is_its = re.compile(rf"(part|starts)-{partition:05d}(?!\d)[0-9.a-z-]*")
    for place in STATE_FOLDERS:
        for name in filter(is_its.fullmatch, store.list(place)):
            with suppress(DamagedObjectError):
                _fetch(store, f"{place}/{name}", folder)


@lru_cache(maxsize=8)
def _find_checkpoint(exchange: Exchange, model_digest: str) -> str:
    checkpoint = resolve_checkpoint(exchange.model)
    if checkpoint_digest(checkpoint) != model_digest:
        raise ModelError(f"model {exchange.model!r} is another one on {platform.node()} than where the run began")
    return str(checkpoint)


@contextmanager
def _in_touch(store: ObjectStore, folder: Path) -> Iterator[None]:
    """For the length of the block a stop request in the store is one here, and progress is shown there; in the end a
    stop request made here is one there."""
    stop, is_told = StopRequest(folder), threading.Event()

    def show() -> None:
        for path in (*folder.glob("progress/*.json"), *folder.glob("engines/*.json")):
            _upload(store, path, folder)

    def look(num_looks: int) -> None:
        if not stop.is_made and store.has(STOP):
            is_told.set()
            stop.make()
        if num_looks % LOOKS_PER_SHOW == LOOKS_PER_SHOW - 1:
            show()

    look(0)
    try:
        with _repeating(look, WORKER_LOOK_SECONDS, store.url):
            yield
    finally:
        if stop.is_made and not is_told.is_set():
            store.put(STOP, b"")
        show()


def _upload(store: ObjectStore, path: Path, folder: Path) -> None:
    store.put(str(path.relative_to(folder)), path.read_bytes())


def _fetch(store: ObjectStore, path: str, folder: Path) -> None:
    content = store.get(path)
    target = folder / path
    target.parent.mkdir(mode=0o700, exist_ok=True)
    with replace_file(target) as file:
        file.write(content)


def _with_noted(folder: str | Path, act: Callable[[RunExchange], None]) -> None:
    """Call with the exchange that the run folder names, if any; what goes wrong is a warning."""
    try:
        url = (Path(folder) / "exchange").read_text()
    except OSError:
        return
    if url:
        with _warn_only(url):
            act(RunExchange(folder, url))


@contextmanager
def _repeating(look: Callable[[int], None], seconds: float, url: str) -> Iterator[None]:
    """Call `look` with 0, 1, ... every so many seconds in a thread of its own, for the length of the block.

    An error of the store is a warning: if it lasts, the main thread meets it.
    """
    has_ended = threading.Event()

    def repeat() -> None:
        num_looks = 0
        while not has_ended.wait(seconds):
            num_looks += 1
            with _warn_only(url):
                look(num_looks)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


@contextmanager
def _warn_only(url: str) -> Iterator[None]:
    try:
        yield
    except BatchloomError as error:
        LOGGER.warning("exchange %s: %s", url, error)
