"""Private folders for temporary files, which are deleted however their process ends."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engine.errors import ArtifactError, DatabaseError
from tasks.database.connection import check_path

PREFIX = "batchloom-"
LOCK = "scratch-folder-lock"
"""File in each folder; no other folder has one of this name, and is deleted."""


@contextmanager
def scratch_folder(name: str, place: Path | None = None) -> Iterator[Path]:
    """A folder ``batchloom-<name>-...`` in `place`, or the folder for temporary files, during the block, readable by
    its owner alone (0700). Those of killed processes are deleted first. Raises `ArtifactError` if DuckDB reads its path
    as a pattern, or files there cannot be locked."""
    place = place or Path(tempfile.gettempdir())
    try:
        check_path(place)
    except DatabaseError as error:
        raise ArtifactError(f"{error}, or name another one in TMPDIR") from error
    _sweep(place)
    unlocked = Path(tempfile.mkdtemp(prefix=f".{PREFIX}{name}-", dir=place))
    lock = os.open(unlocked / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        os.close(lock)
        shutil.rmtree(unlocked, ignore_errors=True)
        raise ArtifactError(f"{place} cannot hold a lock: {error.strerror}; name another folder in TMPDIR") from error
    folder = unlocked.rename(unlocked.with_name(unlocked.name[1:]))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _sweep(place: Path) -> None:
    """Delete the folders of killed processes, whose locks the kernel has released."""
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError), open(folder / LOCK, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
