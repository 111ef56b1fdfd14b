"""Which rows of a workload a step of its cascade answers."""

from dataclasses import dataclass
from typing import Any, Literal

import duckdb

from sql import statement
from tasks.cascades.cascade import find_answer_columns, find_probability_columns
from tasks.database.connection import fill_identifiers
from tasks.workloads.workload import Workload

Role = Literal["first", "sample", "unsure"]
"""Of a step in its cascade: it answers every row, those that both models answer, or those that the first is unsure of.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChoice:
    """The rows of a step of a cascade, among those that the workload's query gives.

    Attributes:
        role: of the step.
        model_digest: of the model that answers every row.
        num_sampled: rows of the sample.
        threshold: rows whose answer has a lower probability are unsure; None: all are.
    """

    role: Role
    model_digest: str
    num_sampled: int = 0
    threshold: float | None = None

    def prepare(self, connection: duckdb.DuckDBPyConnection, workload: Workload) -> str:
        """Make temporary tables of what is answered; returns the one that says which rows are done.

        The first model has done what it has answered itself, whatever the other one has made of it. The other one has
        done a row whose newest answer is its own: whatever the first model has answered since, it has to see again.
        """
        take_answers(connection, workload, self.model_digest, "batchloom_first_answers")
        if self.role == "first":
            return "batchloom_first_answers"
        take_confidences(connection, workload)
        parameters: dict[str, Any] = {"threshold": self.threshold}
        if self.role == "sample":
            parameters = {"salt": workload.digest, "num_sampled": self.num_sampled}
        connection.execute(statement(f"cascade/choose_{self.role}"), parameters)
        return workload.output.table

    def narrow(self, query: str) -> str:
        """The query of checked rows, without those that are not this step's."""
        if self.role == "first":
            return query
        return query.join(fill_identifiers(statement("cascade/chosen_requests")).split("<checked>"))


def take_answers(connection: duckdb.DuckDBPyConnection, workload: Workload, model_digest: str, view: str) -> None:
    """Make a temporary view of all answers that a model has given, as wide as the workload's table.

    Args:
        connection: to the database.
        workload: whose table it is.
        model_digest: of the model.
        view: name of the view, and with ``_runs`` behind it of a table that it needs.
    """
    runs, parameters = f"{view}_runs", {"model_digest": model_digest}
    connection.execute(fill_identifiers(statement("cascade/list_runs"), runs=runs), parameters)
    names = {"view": view, "runs": runs, "table": workload.output.table}
    connection.execute(fill_identifiers(statement("cascade/create_model_view"), **names))


def take_confidences(connection: duckdb.DuckDBPyConnection, workload: Workload) -> None:
    """Make the temporary table ``batchloom_confidences`` of the view ``batchloom_first_answers``."""
    connection.execute(statement("cascade/macro_confidence_of"))
    parameters = {
        "requests_sql": workload.requests_sql,
        "probabilities": list(find_probability_columns(workload)),
        "answers": list(find_answer_columns(workload)),
    }
    connection.execute(fill_identifiers(statement("cascade/take_confidences"), keys=workload.key), parameters)
