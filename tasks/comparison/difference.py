"""Compares the answers of two workloads to the same rows: with each other, and with gold rows."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
from duckdb.sqltypes import DuckDBPyType

from sql import statement
from tasks.comparison.paired_rows import PairedRow, list_values
from tasks.database.connection import connect, execute, fetch_rows, quote_literal
from tasks.database.opening import open_in_memory
from tasks.evaluation.compared_column import NUMBER_TYPES, list_gold_columns
from tasks.evaluation.evaluation import FEWEST_BOOTSTRAP_ROWS, MOST_REPLICATES, Comparison, Metric
from tasks.forecast.sampled import SampledForecast
from tasks.workloads.workload import Workload

LOGGER = logging.getLogger("batchloom")

SIDES = ("first", "second")

ROWS_AT_A_TIME = 1000
"""Rows that one statement inserts: each has a cost of its own, as much as that of hundreds of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A metric of both workloads' answers on gold rows: its means over the rows, and second minus first with a 95%
    interval from paired rows; None if there are too few rows for one, or the difference is equal on each."""

    column_name: str
    metric: str
    first_value: float
    second_value: float
    difference: float
    low: float | None
    high: float | None
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDiff:
    """Two workloads on the same rows.

    Attributes:
        gold: the table of expected values; empty for none.
        rows: of the sample, with both answers; empty if the second workload has no rows.
        changed: those with different answers.
        agreements: of both answers, by column.
        differences: of metrics against gold.
        num_tokens_together: prompt tokens that one batch of both computes; None where two models answer.
        num_tokens_apart: prompt tokens that a batch of each would compute.
        forecast: for all rows of the second workload; None if the model's cost on the device is not known.
    """

    names: tuple[str, str]
    gold: str = ""
    rows: tuple[PairedRow, ...] = ()
    changed: tuple[PairedRow, ...] = ()
    agreements: tuple[Metric, ...] = ()
    differences: tuple[Difference, ...] = ()
    num_tokens_together: int | None = 0
    num_tokens_apart: int = 0
    forecast: SampledForecast | None = None


def check_gold(database: str | Path, gold: str, workloads: tuple[Workload, Workload]) -> list[list[str]]:
    """Check before the work that gold can be compared with the answers of both workloads; returns its keys, as text.
    See `compare_with_gold`."""
    with _copy_gold(database, gold) as memory:
        for workload in workloads:
            comparison = _begin_side(memory, workload, "")
            source = f"latest_{workload.output.table}"
            no_answers = {"run_id": None, "leaves_out_errors": False}
            comparison.execute("gold/answers", no_answers, target="batchloom_answers", source=source, keys=workload.key)
            comparison.read_gold(gold, copy="batchloom_gold")
            execute(memory, "schema/drop_table", table=source)  # the other workload may write to the same one
        return [key for (key,) in memory.table("batchloom_expected_rows").project("request_key").fetchall()]


def compare_with_gold(
    database: str | Path, gold: str, workloads: tuple[Workload, Workload], rows: Sequence[PairedRow]
) -> list[Difference]:
    """Compare both workloads' answers with gold, in memory; the database is only read.

    Args:
        gold: table or view; see `tasks.evaluation.evaluation.evaluate_answers`.
        workloads: the first and the second; `rows` has the answers of both.
    Raises:
        DatabaseError: gold cannot be used for one of the workloads, or none of its rows is in the sample.
    """
    with _copy_gold(database, gold) as memory:
        for side, workload in enumerate(workloads):
            comparison, table = _begin_side(memory, workload, SIDES[side]), f"latest_{workload.output.table}"
            _insert_side(memory, table, side, _written_types(workload), rows, "sample")
            comparison.create_tables()
            comparison.take_answers(None)
            comparison.compare_with_gold(gold, k=1, copy="batchloom_gold")
            execute(memory, "schema/drop_table", table=table)  # the other workload may write to the same one
        parameters = {"num_replicates": MOST_REPLICATES, "fewest_rows": FEWEST_BOOTSTRAP_ROWS}
        return [Difference(**row) for row in fetch_rows(execute(memory, "compare/differences", parameters))]


@contextmanager
def _copy_gold(database: str | Path, gold: str) -> Iterator[duckdb.DuckDBPyConnection]:
    """A database in memory with a copy of gold."""
    with connect(database, read_only=True) as connection:
        gold_types = list_gold_columns(connection, gold)
        gold_rows = connection.sql(statement("compare/read_gold"), params={"gold": gold}).to_arrow_table()
    with open_in_memory(database) as memory:
        memory.register("gold_rows", gold_rows)
        execute(memory, "compare/create_gold", columns=gold_types)
        execute(memory, "compare/insert_gold")
        yield memory


def _begin_side(memory: duckdb.DuckDBPyConnection, workload: Workload, evaluation_id: str) -> Comparison:
    """The evaluation of a workload, with an empty table in place of its view of newest answers."""
    table, types = f"latest_{workload.output.table}", _written_types(workload)
    execute(memory, "schema/create_answers", table=table, keys=workload.key, answers=types)
    return Comparison(memory, workload, evaluation_id)


def measure_agreement(workloads: tuple[Workload, Workload], rows: Sequence[PairedRow]) -> list[Metric]:
    """The agreement of both workloads' answers for each column that both have, over rows that both have answered. A
    column whose types cannot be compared is a warning."""
    answered = [row for row in rows if row.first.error is row.second.error is None]
    first = {name.lower(): duckdb.sqltype(type_) for name, type_ in workloads[0].kind.columns.items()}
    shared: dict[str, str] = {}
    for name, written in workloads[1].kind.columns.items():
        if name.lower() in first and any(name in row.second.answer for row in answered):
            types = (first[name.lower()], duckdb.sqltype(written))
            if common := _find_common_type(*types):
                shared[name] = common
            else:
                LOGGER.warning("%s: not compared, since %s is no %s", name, *types)
    if not shared:
        return []
    whole = workloads[1]
    with open_in_memory(whole.name) as memory:
        for table in (whole.output.table, f"latest_{whole.output.table}"):
            execute(memory, "schema/create_answers", table=table, keys=whole.key, answers=shared)
        for side, name in enumerate(SIDES):
            _insert_side(memory, whole.output.table, side, shared, answered, name)
        comparison = Comparison(memory, whole, "agreement")
        comparison.create_tables()
        comparison.take_answers(SIDES[1])
        comparison.compare_with_run(SIDES[0])
        return comparison.measure()


def _find_common_type(first: DuckDBPyType, second: DuckDBPyType) -> str:
    """A type for the values of both; empty if there is none in which they would be equal as they are."""
    if first == second:
        return str(second)
    if first.id == second.id == "enum":
        labels = dict.fromkeys(label for each in (first, second) for _, labels in each.children for label in labels)
        return f"ENUM({', '.join(map(quote_literal, labels))})"
    are_numbers = all(str(each) in NUMBER_TYPES or each.id == "decimal" for each in (first, second))
    return "DOUBLE" if are_numbers else ""


def _written_types(workload: Workload) -> dict[str, str]:
    """The columns of a workload's answers that a sample has, with their types; it has no ranks."""
    kind = workload.kind
    return {name: type_ for name, type_ in kind.columns.items() if name in kind.written}


def _insert_side(
    memory: duckdb.DuckDBPyConnection,
    table: str,
    side: int,
    types: Mapping[str, str],
    rows: Sequence[PairedRow],
    run_id: str,
) -> None:
    now = datetime.now(UTC)

    def fill(row: PairedRow) -> dict[str, Any]:
        values = list_values(row[side])
        return {
            **row.second.key,
            **{name: _bind(values.get(name.lower()), type_) for name, type_ in types.items()},
            "status": "ok" if row[side].error is None else "error",
            "error": row[side].error,
            "run_id": run_id,
            "created_at": now,
            "content_key": "",
        }

    for first in range(0, len(rows), ROWS_AT_A_TIME):
        chunk = [fill(row) for row in rows[first : first + ROWS_AT_A_TIME]]
        execute(memory, "write/insert_rows", {"rows": chunk}, table=table)


def _bind(value: Any, type_: str) -> Any:
    """A value as a parameter for DuckDB; a map is given as a list of pairs."""
    if value is None or not type_.startswith("MAP("):
        return value
    return {"key": [name for name, _ in value], "value": [each for _, each in value]}
