"""The table and the views of a workload that ``schema.sql`` does not name."""

from functools import cache

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
    views = (Relation(name=f"{kind}_{table}", is_view=True, columns={}) for kind in ("latest", "failed"))
    return {table: _list_table(table, _create_answers(workload)), **{view.name: view for view in views}}


@cache
def _list_table(name: str, create: str) -> Relation:
    """The table that a statement creates in an empty database; opening one takes longer than all else here."""
    with duckdb.connect(":memory:") as blank:
        blank.execute(create)
        return list_relations(blank)[name]


def _create_answers(workload: Workload) -> str:
    return fill_identifiers(
        statement("schema/create_answers"),
        table=workload.output.table,
        keys=workload.key,
        answers=workload.kind.columns,
    )
