"""One run of a database at a time."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import DatabaseError
from tasks.runs.run_folder import private_root


@contextmanager
def hold_database(database: str | Path) -> Iterator[None]:
    """Be the only run of this database for the length of the block; the kernel lets go however the process ends.

    Raises:
        DatabaseError: another run holds it; the message names its process id.
    """
    path = private_root(database) / "lock"
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
