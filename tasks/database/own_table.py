"""The output table and views of a workload whose table is not in ``schema.sql``."""

from functools import cache

import duckdb

from sql import statement
from tasks.database.connection import execute, fill_identifiers, quote_identifier, quote_literal
from tasks.database.schema import Relation, list_relations, list_request_columns
from tasks.workloads.workload import Workload

RANK = """replace (
    case
        when status = 'ok'
            then (row_number() over (partition by {rank_within}, status order by score desc, {keys}))::integer
    end as rank
)"""
"""The rank of a row of the latest view among its rows, in SQL; as in ``sql/write/rank_answers.sql``."""


def create_own_table(connection: duckdb.DuckDBPyConnection, workload: Workload, *, is_foreign: bool) -> None:
    """Create the table if it is missing, and replace its views. See `create_schema`."""
    table = workload.output.table
    requests_sql, types = f"select * exclude (error) from {quote_identifier(table)}", {}
    if not is_foreign:
        types = {name.lower(): each for name, each in list_request_columns(connection, workload, table).items()}
        requests_sql = workload.requests_sql
    connection.execute(_create_answers(workload))
    rank_within = workload.kind.rank_within
    texts = {
        "requests": quote_literal(requests_sql),
        "keys": ", ".join(_cast_key(key, types.get(key.lower(), "")) for key in workload.key),
        "rank": fill_identifiers(RANK, rank_within=rank_within, keys=workload.key) if rank_within else "",
    }
    latest = f"latest_{table}"
    text = fill_identifiers(statement("schema/create_latest_view"), texts, view=latest, table=table, keys=workload.key)
    connection.execute(text)
    execute(connection, "schema/create_failed_view", view=f"failed_{table}", latest=latest, keys=workload.key)


def _cast_key(name: str, type_: str) -> str:
    """The SQL of a key column of the output table as text in the reader's time zone. The table has keys in UTC, see
    `CONNECTION_OPTIONS`; a key of the query that holds times is compared in the reader's zone."""
    column = quote_identifier(name)
    return f"try_cast({column} as {type_})::varchar" if "WITH TIME ZONE" in type_ else column


def list_own_relations(workload: Workload) -> dict[str, Relation]:
    """The relations that `create_own_table` makes, by name; the views without their columns."""
    table = workload.output.table.lower()
    views = (Relation(name=f"{kind}_{table}", is_view=True, columns={}) for kind in ("latest", "failed"))
    return {table: _list_table(table, _create_answers(workload)), **{view.name: view for view in views}}


@cache
def _list_table(name: str, create: str) -> Relation:
    """The table that a statement creates. Cached: opening a database in memory is slow."""
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
