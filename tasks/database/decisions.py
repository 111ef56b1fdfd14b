"""Writes rows of a workload with several questions; each row holds all answers, also those of earlier runs."""

from collections.abc import Mapping, Sequence
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds

from tasks.database.connection import execute
from tasks.workloads.workload import Workload


def insert_decisions(
    connection: duckdb.DuckDBPyConnection,
    workload: Workload,
    row: Mapping[str, Any],
    tokens: str,
    parts: Sequence[str],
    schema: pa.Schema,
) -> None:
    """Write the rows that a run has answered. One statement writes all rows that were asked the same questions. A row
    may have been asked only some of the workload's questions, for example a new one; its other columns are copied from
    its earlier answer.

    Args:
        connection: in a transaction, in which the run has no answers yet.
        row: parameters of the statement that all rows share: requests, model, run_id, created_at.
        tokens, parts: paths of the run's tokens.parquet, which has the errors of prompts, and of its complete parts.
        schema: of a part.
    """
    part_rows = ds.dataset(list(parts), schema=schema) if parts else schema.empty_table()
    connection.register("part_rows", part_rows)
    execute(connection, "write/list_asked_questions", {"tokens": tokens})
    connection.unregister("part_rows")
    digests = workload.kind.question_digests
    asked = execute(connection, "write/list_open_questions", {"requests": row["requests"]}).fetchall()
    shared = {name: value for name, value in row.items() if name != "keys"}
    every = [column for columns in workload.kind.question_columns for column in columns]
    for (numbers,) in asked:
        answered = {column for number in numbers for column in workload.kind.question_columns[number]}
        parameters = {"open_questions": numbers, "names": list(digests), "digests": list(digests.values())}
        execute(
            connection,
            "write/insert_decisions",
            shared | parameters,
            table=workload.output.table,
            keys=workload.key,
            answered=[column for column in every if column in answered],
            kept=["question_states", *(column for column in every if column not in answered)],
        )
    execute(connection, "schema/drop_table", table="batchloom_asked_questions")
