"""How much better the answers of one workload are than those of another, on the same gold rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import duckdb

from engine.errors import DatabaseError
from sql import statement
from tasks.comparison.paired_rows import PairedRow
from tasks.database.connection import connect, fill_identifiers
from tasks.database.messages import explain
from tasks.evaluation.evaluation import MOST_REPLICATES, Comparison
from tasks.workloads.workload import Workload

SIDES = ("first", "second")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A measure of both workloads' answers, on the rows that gold has.

    Attributes:
        first_value, second_value: means over the rows.
        difference: second less first; low and high are its 95% interval, of pairs.
    """

    column_name: str
    metric: str
    first_value: float
    second_value: float
    difference: float
    low: float
    high: float
    num_rows: int


def compare_with_gold(
    database: str | Path,
    gold: str,
    workloads: tuple[Workload, Workload],
    rows: Sequence[PairedRow],
    *,
    lock_timeout_seconds: float = 30.0,
) -> list[Difference]:
    """Judge both sides by gold, in memory; the database is only read.

    Args:
        gold: table or view; see `tasks.evaluation.evaluation.evaluate_answers`.
        workloads: the first and the second.
        rows: their answers.
        lock_timeout_seconds: how long to wait while another process has the database open.
    Raises:
        DatabaseError: gold cannot be used, for one of the workloads; or none of its rows is in the sample.
    """
    with connect(database, read_only=True, lock_timeout_seconds=lock_timeout_seconds) as connection:
        types = dict(connection.execute(statement("gold/column_types"), {"relation": gold}).fetchall())
        if not types:
            raise DatabaseError(f"no table or view {gold!r} with gold rows")
        gold_rows = connection.sql(fill_identifiers(statement("compare/read_gold"), gold=gold)).to_arrow_table()
    with duckdb.connect() as memory:
        try:
            memory.register("gold_rows", gold_rows)
            memory.execute(fill_identifiers(statement("compare/create_gold"), table=gold, columns=types))
            memory.execute(fill_identifiers(statement("compare/insert_gold"), table=gold))
            for side, workload in enumerate(workloads):
                _fill_side(memory, side, workload, rows)
                comparison = Comparison(memory, workload, SIDES[side])
                comparison.create_tables()
                comparison.take_answers("answers", None)
                comparison.compare_with_gold(gold, k=1)
            found = memory.execute(statement("compare/differences"), {"num_replicates": MOST_REPLICATES})
            names = [column[0] for column in found.description or ()]
            return [Difference(**dict(zip(names, row, strict=True))) for row in found.fetchall()]
        except duckdb.Error as error:
            raise DatabaseError(f"{database}: {explain(error)}") from error


def _fill_side(memory: duckdb.DuckDBPyConnection, side: int, workload: Workload, rows: Sequence[PairedRow]) -> None:
    """What one of the two answered; a sample has no ranks."""
    kind, table = workload.kind, f"latest_{workload.output.table}"
    types = {name: type_ for name, type_ in kind.columns.items() if name in kind.written}
    memory.execute(fill_identifiers(statement("compare/create_side"), table=table, keys=workload.key, answers=types))
    now = datetime.now(UTC)
    books = ("status", "error", "run_id", "created_at", "content_key")
    insert = fill_identifiers(statement("compare/insert_side"), table=table, columns=[*workload.key, *types, *books])
    for row in rows:
        status = "ok" if row.errors[side] is None else "error"
        values = [*row.key.values(), *(row.answers[side].get(name) for name in types)]
        fields = [*values, status, row.errors[side], "sample", now, ""]
        memory.execute(insert, {"values": {f"f{number}": value for number, value in enumerate(fields)}})
