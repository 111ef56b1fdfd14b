"""batchloom's tables and views in a user's database: checks, creation, and columns that older tables lack."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import duckdb

from engine.errors import DatabaseError
from sql import statement
from tasks.database.connection import execute
from tasks.database.messages import explain
from tasks.workloads.workload import Workload

INPUT_TABLES = frozenset(("documents", "queries", "snippet_requests", "ranking_candidates"))
WHOLE_NUMBERS = ("BIGINT", "INTEGER", "SMALLINT", "TINYINT", "UINTEGER", "USMALLINT", "UTINYINT")
RUN_RELATIONS = frozenset(("runs", "steps", "run_summary"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """A table or a view. Its name and the names of its columns are in lower case: DuckDB ignores case."""

    name: str
    is_view: bool
    columns: Mapping[str, str]


def list_relations(connection: duckdb.DuckDBPyConnection) -> dict[str, Relation]:
    """Tables and views of the database's current schema, by name in lower case."""
    rows = execute(connection, "schema/relation_columns").fetchall()
    return {name: Relation(name=name, is_view=is_view, columns=columns) for name, is_view, columns in rows}


def check_requests(connection: duckdb.DuckDBPyConnection, workload: Workload, database: str) -> None:
    """Raise `DatabaseError` unless a workload's query is one select without parameters, runs, and returns the columns
    it needs, with a priority of whole numbers.

    Args:
        database: its name in messages.
    """
    returned = list_request_columns(connection, workload, database)
    types = {name.lower(): type_ for name, type_ in returned.items()}
    where = f"{database}: the query of workload {workload.name!r} returns"
    found = connection.sql(workload.requests_sql).columns  # as written; `query` renames the second of `f` and `F`
    for column in (*workload.columns, *filter(None, [workload.priority])):
        if column.lower() not in types:
            raise DatabaseError(f"{where} no column {column!r}; it returns {', '.join(returned)}")
        if len(spellings := dict.fromkeys(name for name in found if name.lower() == column.lower())) > 1:
            raise DatabaseError(f"{where} {' and '.join(spellings)}, which are one name in DuckDB: leave one out")
    if workload.priority and (type_ := types[workload.priority.lower()]) not in WHOLE_NUMBERS:
        expected = f"a priority is a whole number of type {', '.join(WHOLE_NUMBERS)}"
        raise DatabaseError(f"{where} column {workload.priority!r} as {type_}; {expected}")


def list_request_columns(connection: duckdb.DuckDBPyConnection, workload: Workload, database: str) -> dict[str, str]:
    """The columns that the workload's query returns, with their types. See `check_requests`."""
    try:
        query = execute(connection, "read/request_columns", {"requests_sql": workload.requests_sql})
    except duckdb.Error as error:
        reason = explain(error)
        if "/" not in workload.source and reason.startswith("no table or view"):  # it came with batchloom
            reason += "; name your own workload with --workload: the default ones read the tables of docs/tables.md"
        raise DatabaseError(f"{database}: in the query of workload {workload.name!r}: {reason}") from error
    return {column[0]: str(column[1]) for column in query.description or ()}


def create_schema(
    connection: duckdb.DuckDBPyConnection, workload: Workload | None = None, *, is_foreign: bool = False
) -> None:
    """Create the tables and views that a workload's run writes to: all of ``schema.sql`` for None or a workload whose
    output table is there; else ``runs``, ``steps``, ``run_summary``, its own table, and the views ``latest_<table>``
    and ``failed_<table>``. Existing tables stay as they are (inputs may be views), but outputs get the columns that an
    earlier version did not have; views are replaced.

    Args:
        is_foreign: its query or input tables read files that are attached only while rows are read. Then the latest
            view cannot run the query and keeps answers of rows that are gone, also of tables in ``schema.sql``.
    """
    existing = list_relations(connection)
    for name, relation in _needed_relations(workload).items():
        found = existing.get(name)
        if found and not found.is_view and (lacking := relation.columns.keys() - found.columns):
            from tasks.database.existing_tables import add_columns  # imported only when needed

            add_columns(connection, workload, name, lacking)
    is_shipped = workload is None or (not is_foreign and workload.output.table.lower() in _shipped_relations())
    for name, text in _shipped_statements().items():
        if (is_shipped or name in RUN_RELATIONS) and not ("create table" in text and name in existing):
            connection.execute(text)
    if workload is not None and not is_shipped:
        from tasks.database.own_table import create_own_table

        create_own_table(connection, workload, is_foreign=is_foreign)


def check_schema(connection: duckdb.DuckDBPyConnection, workload: Workload, database: str) -> None:
    """Check that the workload's answers can be written to the tables that are there.

    Args:
        database: its name in messages.
    Raises:
        DatabaseError: an existing table lacks a column (both are named) or has one of another type, or the user has a
            table or view of his own under a name that batchloom needs.
    """
    existing, needed = list_relations(connection), _needed_relations(workload)
    types = {**dict.fromkeys(workload.key, "text"), **workload.kind.columns}
    written = {name.lower(): str(duckdb.sqltype(type_)) for name, type_ in types.items()}
    is_own_kind = written.items() <= needed[workload.output.table.lower()].columns.items()
    if not is_own_kind or any(existing.get(name, relation) != relation for name, relation in needed.items()):
        from tasks.database.existing_tables import check_existing  # imported only when needed

        check_existing(existing, needed, written, workload, database)


def _needed_relations(workload: Workload | None) -> Mapping[str, Relation]:
    """The tables and views that `create_schema` makes for a workload in an empty database, by name."""
    shipped = _shipped_relations()
    if workload is None or workload.output.table.lower() in shipped:
        return shipped
    from tasks.database.own_table import list_own_relations  # tables of shipped workloads are in schema.sql

    return {name: shipped[name] for name in RUN_RELATIONS} | list_own_relations(workload)


@cache
def _shipped_relations() -> Mapping[str, Relation]:
    """The tables and views of ``schema.sql``, by name."""
    with duckdb.connect(":memory:") as blank:
        execute(blank, "schema/schema")
        return list_relations(blank)


@cache
def _shipped_statements() -> Mapping[str, str]:
    """The statements of ``schema.sql``, in order, by the name of the table or view."""
    text = statement("schema/schema")
    names = re.findall(r"^create (?:table if not exists|or replace view) (\w+)", text, re.MULTILINE)
    return dict(zip(names, (part.query for part in duckdb.extract_statements(text)), strict=True))
