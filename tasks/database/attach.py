"""Attaches other DuckDB and SQLite files, and folders of table files, under names that SQL may read."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import duckdb

from engine.errors import ConfigError, DatabaseError
from sql import statement
from tasks.database.connection import check_path, execute, fill_identifiers, quote_literal, set_option
from tasks.database.messages import explain
from tasks.database.opening import LOCK_MESSAGE, wait_and_open
from tasks.database.schema import INPUT_TABLES, list_relations
from tasks.workloads.workload import Workload

TABLE_FILES = frozenset((".parquet", ".csv", ".json", ".jsonl"))
"""Suffixes of the files that DuckDB reads without an extension."""

EXTENSIONS = {".xlsx": "excel", ".avro": "avro"}
"""File suffix to the DuckDB extension that reads such files."""

TAKEN_NAMES = frozenset(("main", "temp", "system", "memory"))


def parse_attachments(given: Mapping[str, str], base: Path) -> dict[str, str]:
    """Name to absolute path of a file or folder; relative paths start from `base`. Raises `ConfigError` if a name is
    not usable, or there is nothing at a path that can be attached; the message says which."""
    found = {}
    for name, path in given.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or name.lower() in TAKEN_NAMES:
            raise ConfigError(f"attach: {name!r} is not a free name of letters, digits and '_'")
        whole = base / os.path.expanduser(path)
        if not os.path.exists(whole):
            raise ConfigError(f"attach: {name}: nothing is at {whole}")
        whole = whole.resolve()
        if whole.is_file() and whole.suffix.lower() in {*TABLE_FILES, *EXTENSIONS}:
            raise ConfigError(f'attach: {name}: {whole} is a table; attach its folder: {name} = "{whole.parent}"')
        found[name] = str(whole)
    return found


def attach_all(
    connection: duckdb.DuckDBPyConnection,
    attach: Mapping[str, str],
    queries: Iterable[str],
    lock_timeout_seconds: float = 30.0,
) -> None:
    """Make files and folders readable under their names: a DuckDB or SQLite file is attached, read-only; in a folder
    each table file becomes the view ``name.<file without suffix>``. What no query names is not opened, be it locked or
    half written.

    Args:
        attach: name to path.
        queries: of the workloads.
        lock_timeout_seconds: to wait while another process has a file open for writing.
    Raises:
        DatabaseError: a file is no database, locked for too long, or not readable; DuckDB lacks the extension that
            reads it, or two files of a folder would be one view.
    """
    set_option(connection, "autoinstall_known_extensions", False)  # a missing one is an error
    text = _with_definitions(connection, " ".join(queries))
    for name, path in attach.items():
        if not _names(text, name):
            continue
        check_path(Path(path))
        try:
            if Path(path).is_dir():
                _attach_folder(connection, name, Path(path), text)
            else:
                _attach_file(connection, name, path, lock_timeout_seconds)
        except (duckdb.Error, OSError) as error:
            why = explain(error) if isinstance(error, duckdb.Error) else str(error)
            raise DatabaseError(f"attach: {name}: {path}: {why.removeprefix(f'{path} ')}") from error


def _with_definitions(connection: duckdb.DuckDBPyConnection, text: str) -> str:
    """Queries with the definitions of the views and macros that they name, and that these name."""
    others = execute(connection, "attach/views_and_macros").fetchall()
    while found := [other for other in others if _names(text, other[0])]:
        text = " ".join([text, *(definition for _, definition in found)])
        others = [other for other in others if other not in found]
    return text


def _names(text: str, name: str) -> bool:
    """Whether SQL may name a table or database; true also where it names something else like that."""
    quoted = re.escape(name.replace('"', '""'))
    return re.search(rf"(?<!\w){quoted}(?!\w)", text, re.IGNORECASE) is not None


def _attach_file(connection: duckdb.DuckDBPyConnection, name: str, path: str, lock_timeout_seconds: float) -> None:
    while True:
        try:
            execute(connection, "attach/database_file", {"path": path}, name=name)
            return
        except duckdb.IOException as error:
            if LOCK_MESSAGE not in str(error):
                raise
            wait_and_open(Path(path), error, read_only=True, lock_timeout_seconds=lock_timeout_seconds).close()


def _attach_folder(connection: duckdb.DuckDBPyConnection, name: str, folder: Path, text: str) -> None:
    execute(connection, "attach/folder", name=name)
    tables: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        suffix = path.suffix.lower()
        if suffix in EXTENSIONS:
            if suffix[1:] in text.lower():
                connection.execute(f"load {EXTENSIONS[suffix]}")
        elif suffix in TABLE_FILES and path.is_file():
            other = tables.setdefault(path.stem.lower(), path)  # DuckDB's names have no case
            if other != path:
                raise DatabaseError(f"{other.name} and {path.name} would be one table, {name}.{path.stem}: rename one")
            if _names(text, path.stem):
                check_path(Path(path.name))
                texts = {"path": quote_literal(str(path))}
                connection.execute(fill_identifiers(statement("attach/table_file"), texts, name=name, file=path.stem))


def reads_attachments(connection: duckdb.DuckDBPyConnection, workload: Workload) -> bool:
    """Whether the latest view of the workload would need attachments that this connection lacks; call it outside of a
    transaction. The views of ``schema.sql`` read the input tables, all others the workload's query."""
    texts = [workload.requests_sql]
    if workload.output.table.lower() in ("snippets", "rankings"):
        texts = [f"from {name}" for name in INPUT_TABLES & list_relations(connection).keys()]
    try:
        for text in texts:
            execute(connection, "read/request_columns", {"requests_sql": text})
    except duckdb.Error:
        return True
    return False
