"""DuckDB files: wait for their lock, quote identifiers, say where SQL may reach."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import duckdb

from engine.errors import DatabaseError
from sql import statement
from tasks.database.messages import describe_full_disk, explain

MEMORY_LIMIT = "2GB"
"""Of DuckDB while a night reads or writes; what its joins need beyond that goes to disk."""


def quote_identifier(name: str) -> str:
    """A table or column name as SQL, whatever characters it holds. The one place where identifiers are quoted.

    Raises `DatabaseError` for an empty name or one with a NUL, which no identifier can hold.
    """
    if not name or "\0" in name:
        raise DatabaseError(f"not a name of a table or column: {name!r}")
    return '"' + name.replace('"', '""') + '"'


def fill_identifiers(sql: str, **names: str | Sequence[str] | Mapping[str, str]) -> str:
    """Replace ``{placeholder}`` in a statement by quoted identifiers; several are joined by commas.

    ``{placeholder type}`` puts the type behind each, for column definitions; of names with types of their own, each has
    its type behind it, as DuckDB writes it. Nothing but identifiers and types goes into a statement this way; values
    are bound. Raises `KeyError` for a placeholder without a name, a DuckDB error for what is no type.
    """
    without_header = re.sub(r"\A(?:--.*\n)+", "", sql)

    def quoted(match: re.Match[str]) -> str:
        value = names[match.group(1)]
        if isinstance(value, Mapping):
            return ", ".join(f"{quote_identifier(name)} {duckdb.sqltype(type_)}" for name, type_ in value.items())
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
        raise DatabaseError(f"{path}: {explain(error)}{describe_full_disk(path, error)}") from error
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
    *,
    paths: Iterable[str] = (),
    temp_directory: str | Path | None = None,
    is_attaching: bool = True,
) -> None:
    """From here on SQL reads the database and what is named here: no other file, no network, no variable of Python.

    The restriction belongs to the database as this process has it open: other connections of the process to the same
    file have it too, until all of them are closed.

    Args:
        folders: of batchloom's own files.
        attach: name to absolute path of a folder that SQL may read, or of a DuckDB or SQLite file.
        paths: further files of batchloom's own.
        temp_directory: for what exceeds DuckDB's memory limit; None leaves DuckDB's own, beside the database.
        is_attaching: False: folders may be read, but nothing is put under the names.
    Raises:
        DatabaseError: a path in `attach` is not there or cannot be attached, or a connection of this process is
            restricted to other folders.
    """
    allowed = [f"{path}/" for path in (*map(str, folders), *attach.values()) if not Path(path).is_file()]
    (has_access, reachable), *_ = connection.execute(statement("settings/external_access")).fetchall()
    if not has_access:
        if not set(allowed) <= set(reachable):
            raise DatabaseError(
                f"no right to reach {', '.join(allowed)}: close the other connections of this process to the database"
            )
        return
    if attach and is_attaching:
        from tasks.database.attach import attach_all

        attach_all(connection, attach)
    if temp_directory is not None:
        connection.execute(statement("settings/set_temp_directory"), {"folder": str(temp_directory)})
    connection.execute(statement("settings/set_allowed_directories"), {"folders": allowed})
    connection.execute(statement("settings/set_allowed_paths"), {"paths": list(paths)})
    connection.execute(statement("settings/close_external_access"))
    connection.execute(statement("settings/set_allowed_configs"))
    connection.execute(statement("settings/lock_configuration"))


def _open(path: Path, *, read_only: bool, create: bool, lock_timeout_seconds: float) -> duckdb.DuckDBPyConnection:
    if not create and not path.is_file():
        raise DatabaseError(f"no database at {path}: {'not a file' if path.exists() else 'no such file'}")
    try:
        return duckdb.connect(str(path), read_only=read_only)
    except duckdb.Error as error:
        from tasks.database.locked import wait_and_open  # most databases are free

        return wait_and_open(path, error, read_only=read_only, lock_timeout_seconds=lock_timeout_seconds)
