"""Tables and views that a database already has: whether batchloom can write to them, and columns that they lack.

A user may have made them. Columns that tables of earlier versions lack are added, with null in rows of earlier runs.
"""

from collections.abc import Iterable, Mapping, Set

import duckdb

from engine.errors import DatabaseError
from tasks.database.connection import execute
from tasks.database.schema import INPUT_TABLES, RUN_RELATIONS, Relation
from tasks.workloads.workload import Workload

VIEW_COLUMNS = {"run_summary": ("run_id", "total_seconds"), "ranked_documents": ("query_text", "rank", "score")}
"""Columns that these views of batchloom have in every version, and that a user's own view hardly has."""

OTHER_VIEW_COLUMNS = ("run_id", "finish_reason", "created_at")
"""The same for all other views of batchloom."""

ADDED_TO_ANSWERS = {"compute_ms": "double", "prefix_group": "bigint"}
ADDED_TO_STEPS = {
    **dict.fromkeys(("num_prefix_kv_blocks", "num_request_kv_blocks", "num_cached_kv_blocks"), "bigint"),
    **dict.fromkeys(("num_padding_tokens", "num_swapped_kv_blocks"), "bigint"),
    **dict.fromkeys(("num_guessed_tokens", "num_right_tokens"), "bigint"),
    "worker": "text",
    "started_at": "timestamptz",
}
ADDED = {
    "snippets": ADDED_TO_ANSWERS,
    "rankings": ADDED_TO_ANSWERS,
    "steps": ADDED_TO_STEPS,
    "runs": {"shared_with": "json"},
}


def check_existing(
    existing: Mapping[str, Relation],
    needed: Mapping[str, Relation],
    written: Mapping[str, str],
    workload: Workload,
    database: str,
) -> None:
    """Check that batchloom can use tables, and replace views, that are there under names that it needs.

    Args:
        existing: tables and views of the database, by name.
        needed: those that batchloom makes in an empty database.
        written: columns that the workload writes to its output table, which may lack some, with their types.
        database: its name in messages.
    Raises:
        DatabaseError: see `tasks.database.schema.check_schema`.
    """
    for name, relation in needed.items():
        found = existing.get(name, relation)
        if found.is_view != relation.is_view and name not in INPUT_TABLES:
            kind, expected = ("view", "table") if found.is_view else ("table", "view")
            raise DatabaseError(f"{database}: {name!r} is a {kind}; batchloom needs a {expected} of that name")
    table = workload.output.table.lower()
    if "content_key" not in (own := existing.get(table, needed[table])).columns:
        why = "is not batchloom's, which writes answers to a table that it makes: name another"
        raise DatabaseError(f"{database}: table {table!r} {why}")
    _check_columns(workload, f"{database}: table {table!r}", own, written)
    for name, relation in needed.items():
        if not relation.is_view:
            _check_columns(workload, f"{database}: table {name!r}", existing.get(name, relation), relation.columns)
        else:
            check_own_view(existing, name, VIEW_COLUMNS.get(name, OTHER_VIEW_COLUMNS), database)


def check_own_view(existing: Mapping[str, Relation], name: str, columns: Iterable[str], database: str) -> None:
    """Check that a view of this name, if there is one, is batchloom's own, so that it may be replaced.

    Args:
        existing: tables and views of the database, by name.
        name: in any case.
        columns: which batchloom's view has, and a user's own view hardly has.
    Raises:
        DatabaseError: it lacks one of these columns.
    """
    found = existing.get(name.lower())
    if found and found.is_view and not found.columns.keys() >= set(columns):
        raise DatabaseError(f"{database}: batchloom has not made the view {name!r} and would replace it: rename it")


def _check_columns(workload: Workload, where: str, relation: Relation, expected: Mapping[str, str]) -> None:
    missing = expected.keys() - relation.columns - {column.lower() for column in list_added(workload, relation.name)}
    if missing:
        there = ", ".join(sorted(relation.columns))
        way_out = "add it, or name another table"
        if relation.name in RUN_RELATIONS:
            way_out = f"batchloom keeps its {relation.name} in a table of this name: if this one is yours, rename it"
        raise DatabaseError(f"{where} has no column {min(missing)!r}; it has {there}: {way_out}")
    for column, type_ in expected.items() if relation.name not in INPUT_TABLES else ():
        if (found := relation.columns.get(column, type_)) != type_:
            way_out = "alter its type, or name another column or table"
            raise DatabaseError(f"{where}: column {column!r} is {found}, batchloom writes {type_}: {way_out}")


def list_added(workload: Workload | None, table: str) -> Mapping[str, str]:
    """Columns, with their types, that a table (in lower case) of an earlier version or of an earlier workload file may
    lack: new questions or columns to extract in the workload's file, and thoughts that it keeps. What is read with
    earlier answers, as the states of their questions, is not among them."""
    if workload is None or table != workload.output.table.lower():
        return ADDED.get(table, {})
    columns = {name: type_ for name, type_ in workload.kind.columns.items() if name != "question_states"}
    if workload.kind.mode in ("decide", "extract"):
        return {**ADDED_TO_ANSWERS, **columns}
    return ADDED_TO_ANSWERS | ({"thinking": columns["thinking"]} if workload.kind.thinking == "keep" else {})


def add_columns(
    connection: duckdb.DuckDBPyConnection, workload: Workload | None, table: str, lacking: Set[str]
) -> None:
    """Add to a table those columns of `list_added` that it lacks.

    Args:
        table, lacking: names of the table and of the columns, in lower case.
    """
    for column, type_ in list_added(workload, table).items():
        if column.lower() in lacking:
            execute(connection, "schema/add_column", table=table, column={column: type_})
