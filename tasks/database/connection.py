"""DuckDB files: wait for their lock, tell their errors and a full disk in a line, quote identifiers."""

import errno
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import duckdb

from engine.errors import DatabaseError
from sql import statement

LOCK_MESSAGE = "Could not set lock on file"
DISK_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
OPEN_OTHERWISE_MESSAGE = "different configuration than existing connections"


def quote_identifier(name: str) -> str:
    """A table or column name as SQL, whatever characters it holds. The one place where identifiers are quoted.

    Raises `DatabaseError` for an empty name or one with a NUL, which no identifier can hold.
    """
    if not name or "\0" in name:
        raise DatabaseError(f"not a name of a table or column: {name!r}")
    return '"' + name.replace('"', '""') + '"'


def fill_identifiers(sql: str, **names: str | Sequence[str]) -> str:
    """Replace ``{placeholder}`` in a statement by quoted identifiers; several are joined by commas.

    ``{placeholder type}`` puts the type behind each, for column definitions. Nothing but identifiers goes into a
    statement this way; values are bound. Raises `KeyError` for a placeholder without a name.
    """
    without_header = re.sub(r"\A(?:--.*\n)+", "", sql)

    def quoted(match: re.Match[str]) -> str:
        value = names[match.group(1)]
        each = [value] if isinstance(value, str) else value
        return ", ".join(quote_identifier(name) + match.group(2) for name in each)

    return re.sub(r"\{(\w+)((?: \w+)?)\}", quoted, without_header)


@contextmanager
def connect(
    path: str | Path,
    *,
    read_only: bool = False,
    create: bool = False,
    lock_timeout_seconds: float = 30.0,
    memory_limit: str | None = None,
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a database file for the length of the block; DuckDB's errors inside it become `DatabaseError`.

    Waits while another process holds the file. Where this process itself has it open for writing, a read-only request
    gets a writing connection, since DuckDB keeps one kind a process. Timestamps are in UTC.

    Args:
        create: make the file where there is none.
        lock_timeout_seconds: how long to wait for the lock.
        memory_limit: of DuckDB for this database, as in "2GB"; beyond it sorts and joins spill to disk. None leaves
            DuckDB's own, 80% of the machine's memory.

    Raises:
        DatabaseError: no such file, not a DuckDB file, locked (the message names the process id), or an error of SQL.
    """
    connection = _open(Path(path), read_only=read_only, create=create, lock_timeout_seconds=lock_timeout_seconds)
    try:
        connection.execute(statement("settings/set_time_zone"))
        connection.execute(statement("settings/set_arrow_buffers"))
        connection.execute(statement("settings/set_progress_bar"))
        if memory_limit is not None:
            connection.execute(statement("settings/set_memory_limit"), {"memory_limit": memory_limit})
        yield connection
    except duckdb.Error as error:
        full = describe_free_space(path) if any(os.strerror(number) in str(error) for number in DISK_FULL) else ""
        raise DatabaseError(f"{path}: {explain(error)}{full}") from error
    finally:
        connection.close()


def _open(path: Path, *, read_only: bool, create: bool, lock_timeout_seconds: float) -> duckdb.DuckDBPyConnection:
    if not create and not path.is_file():
        raise DatabaseError(f"no database at {path}: {'not a file' if path.exists() else 'no such file'}")
    deadline = time.monotonic() + lock_timeout_seconds
    wait_seconds = 0.02
    while True:
        try:
            return duckdb.connect(str(path), read_only=read_only)
        except duckdb.Error as error:
            message = str(error)
            if OPEN_OTHERWISE_MESSAGE in message and read_only:
                read_only = False
                continue
            if LOCK_MESSAGE not in message and OPEN_OTHERWISE_MESSAGE not in message:
                raise DatabaseError(f"{path} cannot be opened: {explain(error)}") from error
            if time.monotonic() >= deadline:
                holder = re.search(r"held in (.+?) \(PID (\d+)\)", message)
                who = f"process {holder.group(2)} ({holder.group(1)})" if holder else "another user of this process"
                raise DatabaseError(f"{path} is locked by {who}; waited {lock_timeout_seconds:g} s") from error
        time.sleep(min(wait_seconds, max(0.0, deadline - time.monotonic())))
        wait_seconds = min(1.0, wait_seconds * 2)


def explain(error: duckdb.Error) -> str:
    """DuckDB's message in one line: what is missing and where, without the excerpt of the statement."""
    message = str(error)
    # A common table expression that has the name of the missing table it reads is taken for a reference to itself.
    if match := re.search(r'Table with name (.+?) does not exist|Circular reference to CTE "(.+?)"', message):
        return f"no table or view {match.group(1) or match.group(2)!r}"
    if match := re.search(r'Table "(.+?)" does not have a column named "(.+?)"', message):
        return f"table {match.group(1)!r} has no column {match.group(2)!r}"
    if match := re.search(r'Referenced column "(.+?)" (?:was )?not found', message):
        found = re.search(r"Candidate bindings: (.+)", message)
        return f"no column {match.group(1)!r}" + (f"; there are {found.group(1)}" if found else "")
    return message.strip().splitlines()[0]


def describe_write_error(path: str | Path, error: OSError) -> str:
    """Why a file cannot be written, in a line."""
    reason = error.strerror or str(error)
    return f"{path} cannot be written: {reason}{describe_free_space(path) if error.errno in DISK_FULL else ''}"


def describe_free_space(path: str | Path) -> str:
    """``; 4,096 bytes free in /data``, to end a message with; empty where the folder does not say."""
    folder = Path(path).absolute().parent
    try:
        return f"; {shutil.disk_usage(folder).free:,} bytes free in {folder}"
    except OSError:
        return ""
