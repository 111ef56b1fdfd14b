"""Columns that tables of earlier versions lack; they are added, with null in rows of earlier runs."""

from collections.abc import Mapping, Set

import duckdb

from tasks.database.connection import execute
from tasks.workloads.workload import Workload

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


def list_added(workload: Workload | None, table: str) -> Mapping[str, str]:
    """Columns, with their types, that a table (in lower case) of an earlier version or of an earlier workload file may
    lack: new questions or columns to extract in the workload's file, and thoughts that it keeps."""
    if workload is None or table != workload.output.table.lower():
        return ADDED.get(table, {})
    columns = workload.kind.columns
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
