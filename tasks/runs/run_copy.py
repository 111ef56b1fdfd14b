"""A worker's end of an exchange: a private folder with what it needs of a run; what changes in it goes to the store."""

import atexit
import fcntl
import logging
import os
import platform
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from engine.errors import ArtifactError, ModelError
from engine.model.checkpoint import checkpoint_digest, resolve_checkpoint
from tasks.runs.infer_job import Exchange, InferJob
from tasks.runs.object_store import DamagedObjectError, ObjectStore
from tasks.runs.shared_run import PLAN, STATE_FOLDERS, STOP
from tasks.runs.stop_request import StopRequest
from tasks.storage.artifact import replace_file

LOGGER = logging.getLogger("batchloom")

PREFIX = "batchloom-run-"
"""Of the folders' names, in the folder for temporary files."""

STOP_SECONDS = 2.0
"""Between two looks for a stop request in the store."""

SHOW_EVERY = 3
"""Looks between two reports of progress."""

Publish = Callable[[Path], None]
"""Told of each file that has changed and must outlive this process."""


@contextmanager
def run_at_hand(partition: int, job: InferJob) -> Iterator[tuple[InferJob, Publish]]:
    """The job as this process can do it, and what it must tell of its files.

    Where the run's folder is not within reach, that is a copy of it: what others did of the partition is there.

    Raises:
        ArtifactError: the store cannot be reached, or what it holds is missing or damaged.
        ModelError: the model is not on this host, or is another one here.
        ConfigError: as `ObjectStore`.
    """
    if job.exchange is None:
        yield job, _stay
        return
    store, folder = ObjectStore(job.exchange.url), PROCESS_COPY.open(job.exchange.url)
    plan = folder / PLAN
    if not plan.exists():
        _fetch_plan(store, plan)
    _forget_partition(folder)
    _fetch_state(store, folder, partition)
    here = replace(
        job,
        run_folder=str(folder),
        plan=replace(job.plan, path=str(plan)),
        checkpoint=_find_checkpoint(job.exchange, job.model_digest),
    )
    with _in_touch(store, folder):
        yield here, lambda path: store.put(str(path.relative_to(folder)), path.read_bytes())


class RunCopy:
    """The folder of this process: it serves a run at a time, and goes with the process, however that ends."""

    __slots__ = ("_folder", "_in_use", "_lock", "_url")

    def __init__(self) -> None:
        self._in_use = threading.Lock()
        self._url = ""
        self._folder: Path | None = None
        self._lock = -1

    def open(self, url: str) -> Path:
        """A folder for this run, readable by its owner alone (0700): the same one until another run comes."""
        if self._folder is None or self._url != url:
            self.remove()
            _sweep()
            unlocked = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))
            self._lock = os.open(unlocked / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self._url, self._folder = url, unlocked.rename(unlocked.with_name(unlocked.name[1:]))
        return self._folder

    def remove(self) -> None:
        with self._in_use:  # two threads may see that the process is to end
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                os.close(self._lock)
            self._folder = None


PROCESS_COPY = RunCopy()
atexit.register(PROCESS_COPY.remove)


def _stay(path: Path) -> None:
    """Whoever needs the file sees it where it is."""


def _sweep() -> None:
    """Delete the folders of processes that were killed: the kernel has let go of their locks."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError), open(folder / "lock", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def _fetch_plan(store: ObjectStore, target: Path) -> None:
    """Its digest is checked when it is read."""
    temporary = target.with_suffix(".tmp")
    store.get_file(PLAN, temporary)
    temporary.replace(target)


def _forget_partition(folder: Path) -> None:
    """What is left of another partition is in the store."""
    for name in (*STATE_FOLDERS, "progress"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(mode=0o700)


def _fetch_state(store: ObjectStore, folder: Path, partition: int) -> None:
    """What is there of the partition: of another worker, or of this one. What is not whole is as good as absent."""
    is_its = re.compile(rf"(part|starts)-{partition:05d}(?!\d)[0-9.a-z-]*")
    for place in STATE_FOLDERS:
        for name in filter(is_its.fullmatch, store.list(place)):
            with suppress(DamagedObjectError), replace_file(folder / place / name) as file:
                file.write(store.get(f"{place}/{name}"))


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

    def look() -> None:
        if not stop.is_made and store.has(STOP):
            is_told.set()
            stop.make()

    def show() -> None:
        for path in (*folder.glob("progress/*.json"), *folder.glob("engines/*.json")):
            store.put(str(path.relative_to(folder)), path.read_bytes())

    def keep_in_touch() -> None:
        num_looks = 0
        while not has_ended.wait(STOP_SECONDS):
            try:
                look()
                num_looks += 1
                if num_looks % SHOW_EVERY == 0:
                    show()
            except ArtifactError as error:  # parts cannot be put either, if it lasts
                LOGGER.warning("%s", error)

    look()
    has_ended = threading.Event()
    thread = threading.Thread(target=keep_in_touch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
        if stop.is_made and not is_told.is_set():
            store.put(STOP, b"")
        show()
