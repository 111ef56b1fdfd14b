"""The folder of a database's runs, ``<database>.runs``: one run at a time, and which workloads need crash isolation."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import ArtifactError, DatabaseError


def runs_folder(database: str | Path) -> Path:
    """Where the runs of a database lie: beside the file, links followed, so that one file has one folder."""
    path = Path(database).resolve()
    return path.with_name(path.name + ".runs")


def make_runs_folder(database: str | Path) -> Path:
    """`runs_folder`, made where it is not there, readable by its owner alone; `ArtifactError` where that cannot be."""
    root = runs_folder(database)
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        root.chmod(0o700)
    except OSError as error:
        raise ArtifactError(f"run folder {root} cannot be made: {error}") from error
    return root


@contextmanager
def hold_database(database: str | Path) -> Iterator[None]:
    """Be the only run of this database for the length of the block; the kernel lets go however the process ends.

    Raises:
        DatabaseError: another run holds it; the message names its process id.
    """
    path = make_runs_folder(database) / "lock"
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = file.read().strip() or "unknown"
            raise DatabaseError(f"another run works on {database} (process id {holder}); one at a time") from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def needs_isolation(database: str | Path, workload: str) -> bool:
    """Whether the workload's next run must have its engine in a process of its own.

    An earlier run ended while it tried rows, and no run has come through without such a death since. A row that ends
    its process is found as other failing rows are where the engine has its own process; in the flow's own process it
    would end each night at the same place.
    """
    return _isolation_mark(database, workload).exists()


def set_isolation(database: str | Path, workload: str, *, is_needed: bool) -> None:
    """Say whether the workload's next run needs crash isolation; see `needs_isolation`."""
    if is_needed:
        _isolation_mark(database, workload).touch(mode=0o600)
    else:
        _isolation_mark(database, workload).unlink(missing_ok=True)


def _isolation_mark(database: str | Path, workload: str) -> Path:
    return runs_folder(database) / f"guarded-{workload}"
