"""The types of the columns of an answers table that is there already."""

import duckdb

from engine.errors import DatabaseError
from sql import statement
from tasks.database.connection import fill_identifiers
from tasks.workloads.workload import Workload


def check_types(connection: duckdb.DuckDBPyConnection, workload: Workload, where: str) -> None:
    """Refuse a table that has a column for answers of another type.

    Args:
        workload: says the types.
        where: what the message calls the table.
    """
    table = workload.output.table
    found = connection.execute(fill_identifiers(statement("schema/table_columns"), table=table)).description or ()
    types = {column[0].lower(): str(column[1]) for column in found}
    for column, type_ in workload.kind.columns.items():
        expected = str(duckdb.sqltype(type_))
        if (is_there := types.get(column.lower(), expected)) != expected:
            raise DatabaseError(
                f"{where}: column {column!r} is {is_there}, the workload has {expected}: "
                "give it another name, or the workload another table"
            )
