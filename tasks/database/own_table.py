"""The table and the views of a workload that ``schema.sql`` does not name."""

import duckdb

from sql import statement
from tasks.database.connection import fill_identifiers, quote_identifier
from tasks.database.schema import Relation, list_relations, list_request_columns
from tasks.workloads.workload import Workload


def create_own_table(connection: duckdb.DuckDBPyConnection, workload: Workload, *, is_foreign: bool) -> None:
    """Make the table where there is none, and renew its views. See `create_schema` for the parameters."""
    table = workload.output.table
    requests_sql = f"select * exclude (error) from {quote_identifier(table)}"
    if not is_foreign:
        list_request_columns(connection, workload, table)
        requests_sql = workload.requests_sql
    connection.execute(_create_answers(workload))
    latest = fill_identifiers(
        statement("schema/create_latest_view"), view=f"latest_{table}", table=table, keys=workload.key
    ).split("<requests>")
    connection.execute(requests_sql.replace("'", "''").join(latest))
    connection.execute(
        fill_identifiers(
            statement("schema/create_failed_view"), view=f"failed_{table}", latest=f"latest_{table}", keys=workload.key
        )
    )


def list_own_relations(workload: Workload) -> dict[str, Relation]:
    """What `create_own_table` makes, by name; columns of the table only."""
    table = workload.output.table.lower()
    with duckdb.connect(":memory:") as blank:
        blank.execute(_create_answers(workload))
        own = list_relations(blank)
    for view in (f"latest_{table}", f"failed_{table}"):
        own[view] = Relation(name=view, is_view=True, columns=frozenset())
    return own


def _create_answers(workload: Workload) -> str:
    return fill_identifiers(
        statement("schema/create_answers"),
        table=workload.output.table,
        keys=workload.key,
        answers=workload.kind.columns,
    )
