"""Compares answers with gold rows, or two runs with each other, by ``sql/gold/`` and ``sql/evaluate/``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
from prefect import task
from prefect.cache_policies import NO_CACHE

from engine.errors import DatabaseError
from tasks.database.connection import connect, execute, fetch_rows, quote_identifier, transaction
from tasks.database.existing_tables import check_own_view
from tasks.database.schema import list_relations
from tasks.evaluation.compared_column import ComparedColumn, list_columns, list_gold_columns, match_columns
from tasks.layouts.kept import use_kept
from tasks.runs.run import new_run_id
from tasks.workloads.model_use import bind_again
from tasks.workloads.workload import Workload

CREATED = ("evaluations", "evaluated_rows", "evaluation_metrics", "latest_view", "confusion_view", "calibration_view")
VIEW_COLUMNS = {
    "latest_evaluation_metrics": ("reference", "metric"),
    "evaluation_confusion": ("evaluation_id", "expected"),
    "evaluation_calibration": ("evaluation_id", "tenth"),
}
"""Columns by which the views of `CREATED` are told from a user's own views of these names."""

MACROS = ("probability_of_answer", "batchloom_wilson_low", "batchloom_wilson_high", "weight_of", "bootstrap_quantile",
          "words_of")  # fmt: skip

MOST_REPLICATES, FEWEST_REPLICATES = 1000, 100
FEWEST_BOOTSTRAP_ROWS = 6
"""Fewest rows of a bootstrap: of five rows that all say the same, the test of signs cannot say anything with 95%."""

MOST_DRAWS = 5_000_000
"""Most rows times replicates of the bootstrap; for more rows there are fewer replicates."""

GOLD = "gold"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric of an evaluation; a row of the table ``evaluation_metrics``.

    Attributes:
        reference: "gold", or the id of the run that the answers were compared with.
        label: None for the column as a whole.
        low, high: 95% confidence interval; None if there are too few rows for one.
    """

    reference: str
    column_name: str
    label: str | None
    metric: str
    value: float
    low: float | None
    high: float | None
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What was compared, and the metrics.

    Attributes:
        gold: the table of expected values; empty if only two runs were compared.
        answers: "newest", or the id of the run whose answers were evaluated.
        against: the id of the run that they were compared with; empty for none.
        run_id: of the newest answer compared.
        num_gold_rows: the sum of num_ok, num_errors and num_unanswered.
    """

    evaluation_id: str
    workload: str
    gold: str
    answers: str
    against: str
    run_id: str | None = None
    num_gold_rows: int = 0
    num_ok: int = 0
    num_errors: int = 0
    num_unanswered: int = 0
    metrics: Sequence[Metric] = field(default=())


def bind_to_answers(
    database: str | Path, workload: Workload, run_id: str | None = None, *, lock_timeout_seconds: float = 30.0
) -> Workload:
    """The workload in its kept layout, with the adapter of its newest answer (of a run, or of any), and with what the
    model of this answer decides, such as the labels of a classification head. Raises `ModelError` as `bind_again`, or
    if the adapter is gone.

    Args:
        run_id: of the answer; None for the newest of any run.
        lock_timeout_seconds: to wait while another process has the database open.
    """
    workload, table = use_kept(database, workload, lock_timeout_seconds), workload.output.table
    with connect(database, read_only=True, lock_timeout_seconds=lock_timeout_seconds) as connection:
        if not {table.lower(), "runs"} <= list_relations(connection).keys():
            return workload
        found = execute(connection, "gold/newest_run", {"run_id": run_id}, table=table).fetchall()
    for model, model_digest, adapter in found:
        workload = bind_again(workload.with_adapter(adapter and Path(adapter)), model, model_digest)
    return workload


@task(name="evaluate", retries=0, cache_policy=NO_CACHE, persist_result=False)
def evaluate_answers(
    database: str | Path,
    workload: Workload,
    gold: str | None,
    *,
    run_id: str | None = None,
    against: str | None = None,
    k: int = 10,
    lock_timeout_seconds: float = 30.0,
) -> Evaluation:
    """Compare the answers of a workload, and keep all comparisons and metrics in the database, in one transaction.

    Args:
        gold: table or view, named as in SQL, with the workload's key and columns named like those of the answers.
        run_id: of the answers; None for the newest answer of each row that the workload's query still returns.
        against: another run, with whose answers the same rows are compared.
        k: ranks that count for nDCG.
        lock_timeout_seconds: to wait while another process has the database open.
    Raises:
        DatabaseError: no such table, run or answers; or gold has a column, a key or a value that cannot be compared.
    """
    if gold is None and against is None:
        raise DatabaseError("nothing to compare the answers with: give --gold TABLE or --against RUN_ID")
    evaluation = Evaluation(
        evaluation_id=new_run_id(workload.name),
        workload=workload.name,
        gold=gold or "",
        answers=run_id or "newest",
        against=against or "",
    )
    with connect(database, lock_timeout_seconds=lock_timeout_seconds) as connection, transaction(connection):
        comparison = Comparison(connection, workload, evaluation.evaluation_id)
        comparison.check_views(VIEW_COLUMNS, str(database))
        comparison.create_tables()
        comparison.take_answers(run_id)
        if gold is not None:
            comparison.compare_with_gold(gold, k)
            counts = comparison.note(evaluation)
        if against is not None:
            comparison.compare_with_run(against)
        if gold is None:
            counts = comparison.note(evaluation)
        metrics = comparison.measure()
    return replace(evaluation, **counts, metrics=metrics)


class Comparison:
    """An evaluation, `evaluation_id`, on an open connection, within a transaction."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, workload: Workload, evaluation_id: str) -> None:
        self._connection, self._workload = connection, workload
        self.execute = partial(execute, connection)
        self._this = {"evaluation_id": evaluation_id}
        self._table, self._latest = workload.output.table, f"latest_{workload.output.table}"
        self._most_rows = 0  # of gold, or of the run that answers are compared with
        if self._latest.lower() not in list_relations(connection):
            raise DatabaseError(f"workload {workload.name!r} has no answers yet: there is no view {self._latest!r}")
        self._answer_types = list_gold_columns(connection, quote_identifier(self._latest))
        for name in MACROS:
            self.execute(f"evaluate/macros/{name}")

    def create_tables(self) -> None:
        """Create the tables of evaluations if they are missing, and replace the views."""
        for name in CREATED:
            self.execute(f"evaluate/create_{name}")

    def check_views(self, columns: Mapping[str, Sequence[str]], database: str) -> None:
        """Check that views of these names, where they exist, are batchloom's own. See `check_own_view`."""
        existing = list_relations(self._connection)
        for name, own in columns.items():
            check_own_view(existing, name, own, database)

    def take_answers(self, run_id: str | None, *, is_reference: bool = False) -> None:
        """Create the temporary table of the answers of a run; None for the newest answer of each row. With
        `is_reference` others are compared with them, and errors are left out, except in mode "decide", where a row
        with an error may have answers to other questions."""
        target = "batchloom_expected_rows" if is_reference else "batchloom_answers"
        leaves_out_errors = is_reference and not self._workload.kind.question_digests
        parameters = {"run_id": run_id, "leaves_out_errors": leaves_out_errors}
        source = self._latest if run_id is None else self._table
        self.execute("gold/answers", parameters, target=target, source=source, keys=self._workload.key)
        if len(self._connection.table(target)) == 0:
            raise DatabaseError(
                f"workload {self._workload.name!r} has no answers yet in {self._latest!r}"
                if run_id is None
                else f"run {run_id!r} has no answers in table {self._table!r}"
            )

    def read_gold(self, gold: str, copy: str | None = None) -> list[ComparedColumn]:
        """The columns to compare; raises `DatabaseError` for gold that cannot be used. `copy` is the table with the
        rows of gold; None where gold itself is in this database."""
        gold_types = list_gold_columns(self._connection, copy or gold)
        columns = match_columns(self._workload, gold, gold_types, self._answer_types)
        parameters = {"gold": copy or gold, "keys": list(self._workload.key)}
        self.execute("gold/expected_rows", parameters, keys=self._workload.key)
        self._check_keys(gold)
        self._most_rows = len(self._connection.table("batchloom_expected_rows"))
        num_values = 0
        for column in columns:
            self._pair(column)
            self._check_values(gold, column)
            num_values += self._connection.table("batchloom_pairs").count("given").fetchall()[0][0]
        if not num_values and not any(column.is_nullable for column in columns):
            names = ", ".join(dict.fromkeys(repr(column.expected) for column in columns))
            raise DatabaseError(f"gold table {gold!r} judges nothing: each value of {names} is NULL")
        return columns

    def compare_with_gold(self, gold: str, k: int, copy: str | None = None) -> None:
        """Insert rows with each expected value and its answer.

        Args:
            gold, copy, k: see `read_gold` and `evaluate_answers`.
        """
        for column in self.read_gold(gold, copy):
            given: dict[str, Any] = {**self._this, "column": column.name, "true_label": column.true_label}
            if column.kind == "rank":
                group = {"group": self._workload.key.index(self._workload.kind.rank_within) + 1}
                self.execute("gold/rank_answers", group)
                self._pair(column)
                self.execute("evaluate/insert_rank_rows", given | group | {"k": k})
                continue
            self._pair(column)
            if column.kind == "probability":
                self.execute("evaluate/insert_probability_rows", given)
            else:
                self._insert(column, GOLD, "accuracy" if column.kind == "label" else "exact_match")

    def compare_with_run(self, run_id: str) -> None:
        """Insert rows with each answer and that of another run, where both are there."""
        self.take_answers(run_id, is_reference=True)
        self._most_rows = max(self._most_rows, len(self._connection.table("batchloom_expected_rows")))
        for column in list_columns(self._workload, self._answer_types):
            self._pair(column)
            self._insert(column, run_id, "" if column.is_graded else "agreement")

    def note(self, evaluation: Evaluation) -> dict[str, Any]:
        """Insert the row of ``evaluations``; returns its run id and counts."""
        names = ("workload", "gold", "answers", "against")
        row = {name: getattr(evaluation, name) or None for name in names} | {"created_at": datetime.now(UTC)}
        (counts,) = fetch_rows(self.execute("evaluate/counts"))
        self.execute("write/insert_rows", {"rows": [self._this | row | counts]}, table="evaluations")
        return counts

    def measure(self) -> list[Metric]:
        """Compute, insert and return the metrics of all compared rows, with intervals."""
        num_replicates = min(MOST_REPLICATES, max(FEWEST_REPLICATES, MOST_DRAWS // self._most_rows))
        parameters = {"num_replicates": num_replicates, "fewest_rows": FEWEST_BOOTSTRAP_ROWS}
        self.execute("evaluate/insert_metrics", self._this | parameters)
        return [Metric(**row) for row in fetch_rows(self.execute("evaluate/metrics", self._this))]

    def _pair(self, column: ComparedColumn) -> None:
        probability = column.probability or "batchloom_no_probability"
        identifiers = {"expected": column.expected, "answer": column.name, "probability": probability}
        self.execute("gold/pairs", {"is_nullable": column.is_nullable, "question": column.name}, **identifiers)

    def _insert(self, column: ComparedColumn, reference: str, right: str) -> None:
        parameters = {"column": column.name, "kind": column.kind, "reference": reference, "right": right}
        self.execute("evaluate/insert_rows", self._this | parameters | {"is_nullable": column.is_nullable})

    def _check_keys(self, gold: str) -> None:
        if len(self._connection.table("batchloom_expected_rows")) == 0:
            raise DatabaseError(f"gold table {gold!r} is empty")
        for key, num_rows in self.execute("gold/bad_keys").fetchall():
            named = self._name_key(key)
            reason = f"{num_rows} rows with {named}; one is expected" if num_rows > 1 else f"a row with {named}"
            raise DatabaseError(f"gold table {gold!r} has {reason}")
        for (key,) in self.execute("gold/unmatched_key").fetchall():
            raise DatabaseError(
                f"no row of gold table {gold!r} has an answer of workload {self._workload.name!r}; "
                f"its first is {self._name_key(key)}"
            )

    def _check_values(self, gold: str, column: ComparedColumn) -> None:
        parameters = {"kind": column.kind, "labels": list(column.labels)}
        for key, given in self.execute("gold/bad_values", parameters).fetchall():
            expected = {
                "rank": "a grade of relevance, 0 or above",
                "probability": "true or false",
                "number": "a finite number",
                "label": f"one of the labels {', '.join(map(repr, column.labels))}"
                if column.labels
                else "such a label",
            }.get(column.kind, f"a value of type {self._answer_types[column.name]}")
            found = f"{given[:80]!r} is not {expected}, in the row with {self._name_key(key)}"
            raise DatabaseError(f"gold table {gold!r}, column {column.expected!r}: {found}")

    def _name_key(self, key: Sequence[str | None]) -> str:
        parts = zip(self._workload.key, key, strict=True)
        return ", ".join(f"{name} {'NULL' if value is None else repr(value[:80])}" for name, value in parts)
