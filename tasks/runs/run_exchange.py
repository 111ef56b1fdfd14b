"""A run's copy in an object store, for workers that do not see the run's folder.

The run puts its plan there and copies finished files into its folder (`RunExchange`). A worker has a private folder
with the files it needs (`local_job`), and uploads those that it changes.
"""

import logging
import platform
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
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
KEPT_FOLDERS = ("steps", "parts")
STATE_FOLDERS = (*KEPT_FOLDERS, "attempts")
"""Folders with the state of a partition. Steps are copied first, so that no part is there without its steps."""

FOLDERS = (*STATE_FOLDERS, "engines", "progress")
"""Folders of a run in which workers write."""

LATE = "late"
"""A file in the run's folder: workers had not ended when the run did, and may still write to the store."""

LOOKS_PER_TAKE = 15
"""The run checks for a stop request in each look, and copies new files in one of this many."""

WORKER_LOOK_SECONDS = 2.0
"""Between two looks of a worker for a stop request in the store."""

LOOKS_PER_SHOW = 3
"""A worker checks for a stop request in each look, and uploads its progress in one of this many."""

FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Upload = Callable[[Path], None]
"""Called with each changed file that must outlive this process."""


class RunExchange:
    """The exchange as the run sees it. The run folder's file ``exchange`` holds the URL, for `use_exchange`."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder = folder
        self._store = ObjectStore(url)
        self._seen: dict[str, str] = {}

    def offer(self, plan: ArtifactRef) -> None:
        """Upload what all workers need; `ArtifactError` if that fails."""
        with replace_file(self._folder / "exchange") as file:
            file.write(self._store.url.encode())
        self._store.make_folders(FOLDERS)
        self._store.put_file(PLAN, plan.path)

    def take(self, folders: Sequence[str] = FOLDERS) -> None:
        """Copy new and changed objects into the run folder, except parts and steps that were copied before; truncated
        objects are skipped until they are complete. Raises `ArtifactError` if the store cannot be reached, or the run
        folder cannot be written."""
        for folder in folders:
            for name, version in self._store.list(folder).items():
                path = f"{folder}/{name}"
                if path not in self._seen and folder in KEPT_FOLDERS and (self._folder / path).exists():
                    self._seen[path] = version  # copied by another `RunExchange`
                if FILE_NAME.fullmatch(name) and self._seen.get(path) != version:
                    with suppress(DamagedObjectError):
                        _fetch(self._store, path, self._folder)
                        self._seen[path] = version

    def find(self, parts: Sequence[ArtifactRef]) -> list[ArtifactRef]:
        """The copies, in the run folder, of parts that workers made; `ArtifactError` if one is missing or damaged."""
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
        """Pass on stop requests and `take` now and then during the block, and `take` once at its end."""
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
            with errors_as_warnings(self._store.url):
                self.take()
            raise
        self.take()

    def drop(self) -> None:
        """Delete the copy in the store; `ArtifactError` if that fails. Where workers may still write there, the file
        ``exchange`` stays for once, so that the next run deletes what they have written."""
        self._store.delete()
        late = self._folder / LATE
        (late if late.exists() else self._folder / "exchange").unlink(missing_ok=True)


@contextmanager
def local_job(partition: int, job: InferJob) -> Iterator[tuple[InferJob, Upload]]:
    """The job with paths of this host, and a function to call with each changed file.

    With an exchange, the job's folder is this process's private one, with the state of the partition so far.

    Raises:
        ArtifactError: the store cannot be reached, or what it holds is missing or damaged.
        ModelError: the model is not on this host, or differs from the run's.
        ConfigError: as `ObjectStore`.
    """
    if not job.exchange:
        yield job, lambda path: None
        return
    store, folder = ObjectStore(job.exchange), PROCESS_COPY.open(job.exchange)
    plan = folder / PLAN
    if not plan.exists():  # the plan's digest is checked when it is read
        store.get_file(PLAN, temporary := plan.with_suffix(".tmp"))
        temporary.replace(plan)
    _fetch_partition(store, folder, partition)
    checkpoint = _find_checkpoint(job.model, job.model_digest)
    (member,) = job.members  # a plan of several workloads has no exchange
    members = (replace(member, run_folder=folder),)
    here = replace(job, members=members, plan=replace(job.plan, path=str(plan)), checkpoint=checkpoint)
    with _relaying(store, folder):
        yield here, lambda path: _upload(store, path, folder)


def _fetch_partition(store: ObjectStore, folder: Path, partition: int) -> None:
    """Replace the state of another partition in the folder by that of this one; skip truncated objects."""
    for name in (*STATE_FOLDERS, "progress"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(mode=0o700)
    is_its = re.compile(rf"(part|starts|others)-{partition:05d}(?!\d)[0-9.a-z-]*")
    for place in STATE_FOLDERS:
        for name in filter(is_its.fullmatch, store.list(place)):
            with suppress(DamagedObjectError):
                _fetch(store, f"{place}/{name}", folder)


@lru_cache(maxsize=8)
def _find_checkpoint(model: str, model_digest: str) -> str:
    checkpoint = resolve_checkpoint(model)
    if checkpoint_digest(checkpoint) != model_digest:
        raise ModelError(f"model {model!r} on {platform.node()} differs from the one where the run began")
    return str(checkpoint)


@contextmanager
def _relaying(store: ObjectStore, folder: Path) -> Iterator[None]:
    """During the block, pass on stop requests from the store, and at its end, to it; upload progress."""
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


@contextmanager
def _repeating(look: Callable[[int], None], seconds: float, url: str) -> Iterator[None]:
    """Call `look` with 1, 2, ... every `seconds` in a thread of its own during the block. Errors of the store become
    warnings: if they last, the main thread raises them."""
    has_ended = threading.Event()

    def repeat() -> None:
        num_looks = 0
        while not has_ended.wait(seconds):
            num_looks += 1
            with errors_as_warnings(url):
                look(num_looks)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def is_reached(folder: Path, act: Callable[[RunExchange], None]) -> bool:
    """See `use_exchange`, for a run that has a copy."""
    url = (folder / "exchange").read_text()
    with errors_as_warnings(url):
        act(RunExchange(folder, url))
        return True
    return False


@contextmanager
def errors_as_warnings(url: str) -> Iterator[None]:
    """Log errors of the block, such as of a store that is out of reach, instead of raising them."""
    try:
        yield
    except BatchloomError as error:
        LOGGER.warning("exchange %s: %s", url, error)
