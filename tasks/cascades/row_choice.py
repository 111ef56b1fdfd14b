"""Chooses the rows of a workload that a step of its cascade answers."""

from dataclasses import dataclass
from typing import Any, Literal

import duckdb

from sql import statement
from tasks.cascades.cascade import find_answer_columns, find_probability_columns
from tasks.database.connection import execute, fill_identifiers
from tasks.workloads.workload import Workload

Role = Literal["first", "sample", "unsure"]
"""Role of a step in its cascade: it answers every row, the rows of the sample, or the rows with unsure answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChoice:
    """The rows of the workload's query that a step of a cascade answers.

    Attributes:
        model_digest: of the model that answers every row.
        threshold: rows whose answer has a lower probability are unsure; None: all rows are.
    """

    role: Role
    model_digest: str
    num_sampled: int = 0
    threshold: float | None = None

    def prepare(self, connection: duckdb.DuckDBPyConnection, workload: Workload) -> str:
        """Create temporary tables of answers; returns the name of the table that decides which rows are done.

        For the first model, a row is done if that model has answered it, even if the other one has answered it later.
        For the other model, a row is done if the row's newest answer is from that model. So when the first model has
        answered the row again, the other one must, too.
        """
        take_answers(connection, workload, self.model_digest, "batchloom_first_answers")
        if self.role == "first":
            return "batchloom_first_answers"
        execute(connection, "cascade/macro_confidence_of")
        confidences = {
            "requests_sql": workload.requests_sql,
            "probabilities": list(find_probability_columns(workload)),
            "answers": list(find_answer_columns(workload)),
        }
        execute(connection, "cascade/take_confidences", confidences, keys=workload.key)
        parameters: dict[str, Any] = {"threshold": self.threshold}
        if self.role == "sample":
            parameters = {"salt": workload.digest, "num_sampled": self.num_sampled}
        execute(connection, f"cascade/choose_{self.role}", parameters)
        return workload.output.table

    def narrow(self, query: str) -> str:
        """The query of checked rows, restricted to this step's rows."""
        if self.role == "first":
            return query
        return fill_identifiers(statement("cascade/chosen_requests"), {"checked": query})


def take_answers(connection: duckdb.DuckDBPyConnection, workload: Workload, model_digest: str, target: str) -> None:
    """Create a temporary table of a model's newest answers, with the columns of the workload's table.

    Args:
        target: its name.
    """
    table, parameters = workload.output.table, {"model_digest": model_digest}
    execute(connection, "cascade/take_answers", parameters, target=target, table=table, keys=workload.key)
