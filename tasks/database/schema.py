"""batchloom's tables and views in a user's database: missing ones are created, older ones get the columns they lack."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import duckdb

from engine.errors import DatabaseError
from sql import statement
from tasks.database.messages import explain
from tasks.workloads.workload import Workload

INPUT_TABLES = frozenset(("documents", "queries", "snippet_requests", "ranking_candidates"))
WHOLE_NUMBERS = ("BIGINT", "INTEGER", "SMALLINT", "TINYINT", "UINTEGER", "USMALLINT", "UTINYINT")
RUN_RELATIONS = frozenset(("runs", "steps", "run_summary"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """A table or a view: its name and its columns in lower case, as DuckDB tells no cases apart, with their types."""

    name: str
    is_view: bool
    columns: Mapping[str, str]


def list_relations(connection: duckdb.DuckDBPyConnection) -> dict[str, Relation]:
    """What the database holds in its current schema, by name in lower case."""
    rows = connection.execute(statement("schema/relation_columns")).fetchall()
    return {name: Relation(name=name, is_view=is_view, columns=columns) for name, is_view, columns in rows}


def check_requests(connection: duckdb.DuckDBPyConnection, workload: Workload, database: str) -> None:
    """Find out whether a workload's query runs here and returns the columns it needs, the priority in whole numbers.

    Args:
        database: what messages call it.
    Raises:
        DatabaseError: it does not; or the query is anything but one select without parameters.
    """
    returned = list_request_columns(connection, workload, database)
    types = {name.lower(): type_ for name, type_ in returned.items()}
    where = f"{database}: the query of workload {workload.name!r} returns"
    for column in (*workload.columns, *filter(None, [workload.priority])):
        if column.lower() not in types:
            raise DatabaseError(f"{where} no column {column!r}; it returns {', '.join(returned)}")
    if workload.priority and (type_ := types[workload.priority.lower()]) not in WHOLE_NUMBERS:
        expected = f"a priority is a whole number of type {', '.join(WHOLE_NUMBERS)}"
        raise DatabaseError(f"{where} column {workload.priority!r} as {type_}; {expected}")


def list_request_columns(connection: duckdb.DuckDBPyConnection, workload: Workload, database: str) -> dict[str, str]:
    """Name of each column that the query returns, and its type.

    Args:
        database: what messages call it.
    Raises:
        DatabaseError: the query does not run here.
    """
    try:
        query = connection.execute(statement("read/request_columns"), {"requests_sql": workload.requests_sql})
    except duckdb.Error as error:
        raise DatabaseError(f"{database}: {explain(error)}, which workload {workload.name!r} reads") from error
    return {column[0]: str(column[1]) for column in query.description or ()}


def create_schema(
    connection: duckdb.DuckDBPyConnection, workload: Workload | None = None, *, is_foreign: bool = False
) -> None:
    """Make what a workload's run writes to, or all of ``schema.sql`` where none is named.

    A workload whose output table ``schema.sql`` holds gets all of it; any other gets ``runs``, ``steps``,
    ``run_summary``, its own table, and the views ``latest_<table>`` and ``failed_<table>``. Tables that are there stay
    as they are (inputs may be views), but outputs get the columns that an earlier version did not have; views are
    renewed. DuckDB's errors pass through; `connect` translates them.

    Args:
        workload: whose tables are made.
        is_foreign: its query reads what is not attached here, nor where an analyst opens the database. Then its
            latest view does not leave out answers that nobody asks for any more.
    """
    existing = list_relations(connection)
    for name, relation in _needed_relations(workload).items():
        found = existing.get(name)
        if found and not found.is_view and (lacking := relation.columns.keys() - found.columns):
            from tasks.database.older_tables import add_columns  # most tables are of this version

            add_columns(connection, workload, name, lacking)
    is_shipped = workload is None or workload.output.table.lower() in _shipped_relations()
    for name, text in _shipped_statements().items():
        if (is_shipped or name in RUN_RELATIONS) and not ("create table" in text and name in existing):
            connection.execute(text)
    if workload is not None and not is_shipped:
        from tasks.database.own_table import create_own_table

        create_own_table(connection, workload, is_foreign=is_foreign)


def check_schema(connection: duckdb.DuckDBPyConnection, workload: Workload, database: str) -> None:
    """Find out before the night's work whether its answers will have a place.

    Args:
        workload: names the table of answers and its columns.
        database: what the message calls the database.
    Raises:
        DatabaseError: a table that exists lacks a column (both are named), or has one of another type; or something
            else has its name.
    """
    existing = list_relations(connection)
    table = workload.output.table.lower()
    needed = _needed_relations(workload)
    types = {**dict.fromkeys(workload.key, "text"), **workload.kind.columns}
    columns = {name.lower(): str(duckdb.sqltype(type_)) for name, type_ in types.items()}
    _check_columns(workload, f"{database}: table {table!r}", existing.get(table, needed[table]), columns)
    for name, relation in needed.items():
        found = existing.get(name)
        if found is None:
            continue
        if found.is_view != relation.is_view and name not in INPUT_TABLES:
            kind, expected = ("view", "table") if found.is_view else ("table", "view")
            raise DatabaseError(f"{database}: {name!r} is a {kind}; batchloom needs a {expected} of that name")
        if not relation.is_view:
            _check_columns(workload, f"{database}: table {name!r}", found, relation.columns)


def _check_columns(workload: Workload, where: str, relation: Relation, expected: Mapping[str, str]) -> None:
    if missing := expected.keys() - relation.columns:
        from tasks.database.older_tables import list_added  # most tables are of this version

        missing -= {column.lower() for column in list_added(workload, relation.name)}
    if missing:
        raise DatabaseError(f"{where} has no column {min(missing)!r}; it has {', '.join(sorted(relation.columns))}")
    for column, type_ in expected.items() if relation.name not in INPUT_TABLES else ():
        if (found := relation.columns.get(column, type_)) != type_:
            way_out = "alter its type, or name another column or table"
            raise DatabaseError(f"{where}: column {column!r} is {found}, batchloom writes {type_}: {way_out}")


def _needed_relations(workload: Workload | None) -> Mapping[str, Relation]:
    """What `create_schema` makes for a workload in an empty database, by name."""
    shipped = _shipped_relations()
    if workload is None or workload.output.table.lower() in shipped:
        return shipped
    from tasks.database.own_table import list_own_relations  # the shipped workloads have theirs in schema.sql

    return {name: shipped[name] for name in RUN_RELATIONS} | list_own_relations(workload)


@cache
def _shipped_relations() -> Mapping[str, Relation]:
    """What ``schema.sql`` makes, by name."""
    with duckdb.connect(":memory:") as blank:
        blank.execute(statement("schema/schema"))
        return list_relations(blank)


@cache
def _shipped_statements() -> Mapping[str, str]:
    """Name to statement, in the order of ``schema.sql``."""
    statements = {}
    for part in duckdb.extract_statements(statement("schema/schema")):
        match = re.search(r"^create (?:table if not exists|or replace view) (\w+)", part.query, re.MULTILINE)
        if match is None:
            raise AssertionError(f"schema.sql holds a statement that makes neither table nor view: {part.query}")
        statements[match.group(1)] = part.query
    return statements
