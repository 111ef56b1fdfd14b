"""Connections to DuckDB files: quoting identifiers, restricting what SQL may read."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import duckdb

from engine.errors import DatabaseError
from sql import statement

MEMORY_LIMIT, MOST_THREADS = "2GB", 4
"""DuckDB's memory limit while a night reads or writes, and its most threads: each needs memory that cannot spill."""

CONNECTION_OPTIONS: Mapping[str, str | bool] = {
    "TimeZone": "UTC",
    "arrow_large_buffer_size": True,  # a batch may hold more than 2 GiB of text
    "enable_progress_bar": False,
}
"""Settings of DuckDB for each connection."""

Names = str | Sequence[str] | Mapping[str, str]  # of identifiers: one, several, or several with their types
NO_DATABASE = "{} cannot be opened: not a valid DuckDB database file; name a DuckDB file, and others with --attach"


def quote_identifier(name: str) -> str:
    """A table or column name quoted for SQL; no other place quotes identifiers. Raises `DatabaseError` for an empty
    name or one with a NUL, which no identifier can hold."""
    if not name or "\0" in name:
        raise DatabaseError(f"not a name of a table or column: {name!r}")
    return '"' + name.replace('"', '""') + '"'


def quote_literal(text: str) -> str:
    """A text as a literal of SQL, for statements in which DuckDB binds no values; no other place quotes literals."""
    return "'" + text.replace("'", "''") + "'"


def fill_identifiers(sql: str, texts: Mapping[str, str] | None = None, /, **names: Names) -> str:
    """Replace ``{placeholder}`` in a statement by quoted identifiers, several joined by commas, and ``<placeholder>``
    by its SQL in `texts`. ``{placeholder type}`` adds the type to each, for column definitions; a mapping of names to
    types adds each name's own type. Values are bound instead. Raises a DuckDB error for an unknown type."""
    without_header = re.sub(r"\A(?:--.*\n)+", "", sql)

    def quoted(match: re.Match[str]) -> str:
        if match.group(3):
            return (texts or {})[match.group(3)]
        value = names[match.group(1)]
        if isinstance(value, Mapping):
            return ", ".join(f"{quote_identifier(name)} {duckdb.sqltype(type_)}" for name, type_ in value.items())
        each = [value] if isinstance(value, str) else value
        return ", ".join(quote_identifier(name) + match.group(2) for name in each)

    return re.sub(r"\{(\w+)((?: \w+)?)\}|<(\w+)>", quoted, without_header)


def execute(
    connection: duckdb.DuckDBPyConnection, name: str, parameters: Mapping[str, Any] | None = None, /, **names: Names
) -> duckdb.DuckDBPyConnection:
    """Run ``sql/<name>.sql`` with bound `parameters`. See `fill_identifiers` for names."""
    return connection.execute(fill_identifiers(statement(name), **names) if names else statement(name), parameters)


def set_connection_options(connection: duckdb.DuckDBPyConnection) -> None:
    for name, value in CONNECTION_OPTIONS.items():
        set_option(connection, name, value)


def set_option(connection: duckdb.DuckDBPyConnection, name: str, value: str | bool | list[str]) -> None:
    """Change a setting of DuckDB.

    Args:
        name, value: as DuckDB documents them; a setting holds for the connection, or for the database in this process.
    """
    execute(connection, "settings/set", {"value": value}, setting=name)


def fetch_rows(result: duckdb.DuckDBPyConnection) -> list[dict[str, Any]]:
    """The rows of a result, each as column to value."""
    names = [column[0] for column in result.description or ()]
    return [dict(zip(names, row, strict=True)) for row in result.fetchall()]


@contextmanager
def connect(
    path: str | Path,
    *,
    read_only: bool = False,
    create: bool = False,
    lock_timeout_seconds: float = 30.0,
    memory_limit: str | None = None,
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a database file during the block; DuckDB's errors in the block become `DatabaseError`, as do a missing file,
    one of another format, and one that is locked for too long (the message names the process id).

    If this process has the file open for writing, a read-only request gets a writing connection: DuckDB allows one kind
    in a process. Timestamps are in UTC.

    Args:
        create: make the file if it is missing.
        memory_limit: of DuckDB, as in "2GB"; sorts and joins that need more spill to disk.
    """
    connection = _open(Path(path), read_only=read_only, create=create, lock_timeout_seconds=lock_timeout_seconds)
    try:
        if execute(connection, "settings/database_file").fetchone() in (None, (None,)):  # SQLite, CSV
            raise DatabaseError(NO_DATABASE.format(path))
        set_connection_options(connection)
        if memory_limit is not None:
            set_option(connection, "memory_limit", memory_limit)
        yield connection
    except Exception as error:
        from tasks.database.opening import raise_plainly  # imported only when needed

        raise_plainly(path, error)
    finally:
        connection.close()


@contextmanager
def transaction(connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """What the block writes is committed when it ends, and rolled back where it or the commit fails."""
    connection.begin()
    try:
        yield
        connection.commit()
    except BaseException:
        with suppress(duckdb.TransactionException):  # a commit that fails has rolled back
            connection.rollback()
        raise


def restrict_sql(
    connection: duckdb.DuckDBPyConnection,
    folders: Iterable[Path],
    attach: Mapping[str, str],
    queries: Iterable[str] = (),
    *,
    paths: Iterable[str] = (),
    temp_directory: str | Path | None = None,
    lock_timeout_seconds: float = 30.0,
) -> None:
    """Restrict SQL to the database and the files named here: no other file, no network, no variable of Python; and to
    `MOST_THREADS`. This holds for all connections of this process to the same file, until all of them are closed.
    Raises `DatabaseError` if a path cannot be attached, or another connection of this process is restricted to other
    folders.

    Args:
        folders, paths: batchloom's own folders and files.
        attach: name to the absolute path of a folder that SQL may read, or of a DuckDB or SQLite file.
        temp_directory: for what exceeds DuckDB's memory limit; None is DuckDB's default, beside the database.
        queries, lock_timeout_seconds: see `attach_all`; the folders of `attach` may always be read by path.
    """
    allowed = [f"{path}/" for path in (*map(str, folders), *attach.values()) if not Path(path).is_file()]
    (has_access, reachable), *_ = execute(connection, "settings/external_access").fetchall()
    if not has_access:
        if not set(allowed) <= set(reachable):
            raise DatabaseError(f"no right to reach {', '.join(allowed)}: close this process's other connections to it")
        return
    if attach and queries:
        from tasks.database.attach import attach_all

        attach_all(connection, attach, queries, lock_timeout_seconds)
    if temp_directory is not None:
        set_option(connection, "temp_directory", str(temp_directory))
    execute(connection, "settings/threads", {"most": MOST_THREADS})
    set_option(connection, "allowed_directories", allowed)
    set_option(connection, "allowed_paths", list(paths))
    set_option(connection, "enable_external_access", False)
    set_option(connection, "allowed_configs", [*CONNECTION_OPTIONS, "memory_limit", "disabled_optimizers"])
    set_option(connection, "lock_configuration", True)


def check_path(path: Path) -> None:
    """Raise `DatabaseError` if DuckDB takes the path for a pattern, which other files may match, too."""
    if found := re.search(r"[*?[\\]", str(path)):
        raise DatabaseError(f"{path}: DuckDB reads {found[0]} in a path as a pattern: rename the file or folder")


def _open(path: Path, *, read_only: bool, create: bool, lock_timeout_seconds: float) -> duckdb.DuckDBPyConnection:
    if not create and not path.is_file():
        raise DatabaseError(f"no database at {path}: {'not a file' if path.exists() else 'no such file'}")
    for name in (path, path.resolve()):
        check_path(name)
    try:
        return duckdb.connect(str(path), read_only=read_only)
    except duckdb.Error as error:
        from tasks.database.opening import wait_and_open  # imported only when needed

        return wait_and_open(path, error, read_only=read_only, lock_timeout_seconds=lock_timeout_seconds)
