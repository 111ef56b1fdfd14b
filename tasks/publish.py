"""Publishes a complete copy of the database for readers, so that readers and writers never lock each other out."""

import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from engine.errors import ArtifactError, ConfigError, DatabaseError
from tasks.database.connection import connect, execute
from tasks.storage.artifact import replace_file

LOGGER = logging.getLogger("batchloom")

DUCKDB_HEADER = b"DUCK"
"""Bytes 8 to 11 of each database file."""

COPY_BYTES = 16 * 1024**2
WAIT_SECONDS = 0.2


def check_target(database: Path, target: Path, attach: Mapping[str, str]) -> None:
    """Check that a copy of the database can be written to `target`: a temporary file is made beside it and deleted.

    Args:
        attach: name to path of what queries read beside the database.
    Raises:
        ConfigError: its folder is missing or takes no file, or it is a folder itself, a file that is no copy, the
            database, or attached.
    """
    if "\0" in str(target):
        raise ConfigError(f"publish: no file's name holds a NUL, got {str(target)!r}")
    if not target.parent.is_dir():
        raise ConfigError(f"publish: no folder {target.parent}")
    if not os.access(target.parent, os.W_OK):
        raise ConfigError(f"publish: {target.parent} cannot be written: the folder, or its file system, is read-only")
    if target.is_dir():
        raise ConfigError(f"publish: {target} is a folder, expected a file or nothing")
    if target.resolve() == database.resolve() or (target.exists() and target.samefile(database)):
        raise ConfigError(f"publish: {target} is the database itself")
    if target.exists():
        for name, path in attach.items():
            if target.samefile(path):
                raise ConfigError(f"publish: {target} is attached as {name!r} and would be replaced; name another file")
        with target.open("rb") as file:
            header = file.read(12)
        if header and header[8:] != DUCKDB_HEADER:
            raise ConfigError(f"publish: {target} is not a DuckDB database and would be replaced; name another file")
    try:
        with suppress(_NotReplacedError), replace_file(target):
            raise _NotReplacedError
    except ArtifactError as error:
        raise ConfigError(f"publish: {error}") from error


class _NotReplacedError(Exception):
    """Ends `replace_file` before it replaces the file."""


def publish_night(database: Path, target: Path, *, is_lenient: bool = False) -> None:
    """`publish` at the end of a flow.

    Args:
        is_lenient: the night has failed already: try once, and log an error instead of raising it.
    """
    task_of_night = publish.with_options(retries=0) if is_lenient else publish
    state = task_of_night(str(database), str(target), return_state=True)
    if state.is_completed() or not is_lenient:
        LOGGER.info("published: %s, %s bytes", target, f"{state.result():,}")
    else:
        LOGGER.warning("%s is not renewed: %s", target, state.message)


@task(name="publish", retries=2, retry_delay_seconds=10, cache_policy=NO_CACHE, persist_result=False)
def publish(database: str | Path, target: str | Path, *, lock_timeout_seconds: float = 60.0) -> int:
    """Replace `target` by a copy of the database as it was last committed; returns the copy's size in bytes. It is
    retried, because a lock or a full disk may not last.

    Processes that have the old copy open go on reading it. During the copy others may read the database, but not write
    to it. Do not call this while this process has the database open.

    Args:
        target: file that is replaced atomically.
        lock_timeout_seconds: how long to wait while another process has the database open.
    Raises:
        DatabaseError: the database is locked for longer than `lock_timeout_seconds`, or a process writes to the copy.
        OSError: the copy cannot be written; the old one stays.
    """
    database, target = Path(database), Path(target)
    log = target.with_name(f"{target.name}.wal")
    if log.exists():
        raise DatabaseError(f"{log} exists: somebody writes to the published copy; close it and delete {log.name}")
    for path in target.parent.glob(f".{target.name}.*.tmp"):  # of `replace_file`, whose process was killed
        if re.fullmatch(rf"\.{re.escape(target.name)}\.\d+-[0-9a-f]{{8}}\.tmp", path.name):
            path.unlink(missing_ok=True)
    deadline = time.monotonic() + lock_timeout_seconds
    while True:
        with connect(database, lock_timeout_seconds=max(0.0, deadline - time.monotonic())) as connection:
            execute(connection, "write/checkpoint")
        with open(database, "rb") as source:
            if _keep_writers_out(source.fileno(), database):
                with replace_file(target) as copy:
                    os.fchmod(copy.fileno(), os.fstat(source.fileno()).st_mode & 0o444)
                    shutil.copyfileobj(source, copy, COPY_BYTES)
                return target.stat().st_size
        if time.monotonic() > deadline:
            raise DatabaseError(f"{database} is written to all the time; waited {lock_timeout_seconds:g} s")
        time.sleep(WAIT_SECONDS)


def _keep_writers_out(descriptor: int, database: Path) -> bool:
    """Take the lock that DuckDB's readers take; False if a writer holds the database or left data in its log."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    log = database.with_name(f"{database.name}.wal")
    return not log.exists() or log.stat().st_size == 0
