"""Opens a DuckDB file that could not be opened at once, and databases in memory; says what ended a query."""

import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import duckdb

from engine.errors import DatabaseError
from tasks.database.connection import NO_DATABASE, set_connection_options
from tasks.database.messages import DISK_FULL, describe_free_space, explain

LOGGER = logging.getLogger("batchloom")

LOG_AFTER_SECONDS = 1.0
"""Shorter waits are not logged: a night has the database open for about so long."""

LOCK_MESSAGE = "Could not set lock on file"
OPEN_OTHERWISE_MESSAGE = "different configuration than existing connections"
OTHER_FILE_MESSAGES = "Cannot launch in-memory database in read-only mode", "sqlite_scanner"
"""DuckDB's for a file of another format that it reads as a table, such as Parquet or CSV, and for a SQLite file."""


def wait_and_open(
    path: Path, error: duckdb.Error, *, read_only: bool, lock_timeout_seconds: float
) -> duckdb.DuckDBPyConnection:
    """Open a file that could not be opened at once. A wait of more than a second is logged.

    Args:
        error: why it could not.
        read_only: a file that this process has open for writing is opened for writing, too.
        lock_timeout_seconds: to wait while another process holds the file.
    Raises:
        DatabaseError: not a DuckDB file, locked (the message names the process id), or not readable.
    """
    begun, wait_seconds, is_logged = time.monotonic(), 0.02, False
    while True:
        message = str(error)
        if any(part in message for part in OTHER_FILE_MESSAGES):
            raise DatabaseError(NO_DATABASE.format(path)) from error
        if OPEN_OTHERWISE_MESSAGE in message and read_only:
            read_only = False
        elif LOCK_MESSAGE not in message and OPEN_OTHERWISE_MESSAGE not in message:
            raise DatabaseError(f"{path} cannot be opened: {explain(error)}") from error
        else:
            waited = time.monotonic() - begun
            holder = re.search(r"held in (.+?) \(PID (\d+)\)", message)
            by = f"process {holder.group(2)} ({holder.group(1)})" if holder else "another user of this process"
            locked = f"{path} is locked by {by}"
            if waited >= lock_timeout_seconds:
                raise DatabaseError(f"{locked}; waited {lock_timeout_seconds:g} s") from error
            if waited >= LOG_AFTER_SECONDS and not is_logged:
                LOGGER.warning("%s; waiting up to %g s", locked, lock_timeout_seconds)
                is_logged = True
            time.sleep(min(wait_seconds, lock_timeout_seconds - waited))
            wait_seconds = min(1.0, wait_seconds * 2)
        try:
            return duckdb.connect(str(path), read_only=read_only)
        except duckdb.Error as again:
            error = again


INTERRUPTED = re.compile(r"\AQuery interrupted\Z|executing the UDF: (KeyboardInterrupt|SystemExit|TerminationSignal)")
"""DuckDB's messages where a signal came during a query: what its handler raised is lost. In a flow, SIGTERM raises
Prefect's `TerminationSignal`."""


def raise_plainly(path: str | Path, error: Exception) -> NoReturn:
    """Raise `KeyboardInterrupt` if a signal ended a query, `DatabaseError` for an error of DuckDB, else the error."""
    if INTERRUPTED.search(str(error)):
        raise KeyboardInterrupt from error
    if isinstance(error, duckdb.Error):
        is_full = any(os.strerror(number) in str(error) for number in DISK_FULL)
        raise DatabaseError(f"{path}: {explain(error)}{describe_free_space(path) if is_full else ''}") from error
    raise error


@contextmanager
def open_in_memory(name: str | Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """An empty database in memory during the block; errors in the block are those of `connect`, and name the file or
    workload whose rows are computed with."""
    with duckdb.connect() as connection:
        set_connection_options(connection)
        try:
            yield connection
        except Exception as error:
            raise_plainly(name, error)
