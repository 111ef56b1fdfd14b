"""The facts of a run out of its database, by the statements in ``sql/report/`` alone."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import duckdb

from engine.errors import ArtifactError, DatabaseError
from sql import statement
from tasks.database.connection import fill_identifiers
from tasks.report_page.run_facts import (
    CachedShareBin,
    EngineRow,
    ErrorReason,
    LengthBin,
    PartitionRow,
    RunFacts,
    RunRow,
    ShareDegreeBin,
    SlowGroup,
    SlowStep,
    StepBin,
    StepTotals,
    UtilisationBin,
)
from tasks.storage.artifact import ArtifactRef, open_parquet

NUM_STEP_BINS = 240
NUM_LENGTH_BINS = 14
NUM_SLOWEST = 10
NUM_REASONS = 20

Row = TypeVar("Row")


def read_run(connection: duckdb.DuckDBPyConnection, run_id: str | None = None) -> RunRow:
    """A run as a whole; None is the newest.

    Raises:
        DatabaseError: there is no such run. DuckDB's errors pass through; `connect` translates them.
    """
    for run in _read(connection, RunRow, "report/run", {"run_id": run_id}):
        return run
    raise DatabaseError("no run in table runs yet" if run_id is None else f"no run {run_id!r} in table runs")


def read_run_facts(connection: duckdb.DuckDBPyConnection, run: RunRow, plan: ArtifactRef | None = None) -> RunFacts:
    """Everything the page of a run shows; makes temporary tables in the connection, changes nothing in the database.

    Args:
        plan: its plan artifact, where it is known; one that is gone or damaged counts as unknown.
    """
    connection.execute(statement("report/timeline"), {"run_id": run.run_id})
    connection.execute(statement("report/nice_width"))
    (totals,) = _read(connection, StepTotals, "report/step_totals")
    slowest = {"num_rows": NUM_SLOWEST}
    config, versions = _json_object(run.config), _json_object(run.versions)
    prediction = config.get("prediction")
    return RunFacts(
        run=run,
        totals=totals,
        bins=_read(connection, StepBin, "report/step_bins", {"num_bins": NUM_STEP_BINS}),
        utilisation=_read(connection, UtilisationBin, "report/utilisation"),
        engines=_read(connection, EngineRow, "report/engines"),
        partitions=_read(connection, PartitionRow, "report/slowest_partitions", slowest),
        slow_steps=_read(connection, SlowStep, "report/slowest_steps", slowest),
        config=config,
        versions={name: str(found) for name, found in versions.items()},
        prediction=prediction if isinstance(prediction, dict) else {},
        **_read_plan(connection, plan),
        **_read_answers(connection, run.run_id, _key_columns(config)),
    )


def _read_answers(connection: duckdb.DuckDBPyConnection, run_id: str, keys: Sequence[str]) -> dict[str, Any]:
    """What the rows of the output table say; nothing where no table holds a row of this run.

    Reads report_plan_groups.
    """
    this_run = {"run_id": run_id}
    for (table,) in connection.execute(statement("report/answer_tables")).fetchall():
        if connection.execute(fill_identifiers(statement("report/has_answers"), table=table), this_run).fetchall()[0][
            0
        ]:
            lengths = this_run | {"num_bins": NUM_LENGTH_BINS}
            reasons = this_run | {"num_rows": NUM_REASONS}
            slowest = this_run | {"num_rows": NUM_SLOWEST}
            return {
                "lengths": _read(connection, LengthBin, "report/lengths", lengths, table=table),
                "cached_shares": _read(connection, CachedShareBin, "report/cached_shares", this_run, table=table),
                "errors": _read(connection, ErrorReason, "report/errors", reasons, table=table),
                "slow_groups": _read(connection, SlowGroup, "report/slowest_groups", slowest, table=table, keys=keys),
            }
    return {}


def _read_plan(connection: duckdb.DuckDBPyConnection, plan: ArtifactRef | None) -> dict[str, Any]:
    """What the plan says; makes report_plan_groups, empty where there is no plan."""
    connection.execute(statement("report/plan_groups_none"))
    if plan is None:
        return {}
    try:
        open_parquet(plan).close()
    except ArtifactError:
        return {}
    file = {"plan": plan.path}
    connection.execute(statement("report/plan_groups"), file)
    return {
        "share_degrees": _read(connection, ShareDegreeBin, "report/share_degrees", file),
        "prefix_lengths": _read(connection, LengthBin, "report/prefix_lengths", file | {"num_bins": NUM_LENGTH_BINS}),
    }


def _read(
    connection: duckdb.DuckDBPyConnection,
    row_type: type[Row],
    name: str,
    parameters: Mapping[str, Any] | None = None,
    **identifiers: str | Sequence[str],
) -> list[Row]:
    """The rows of ``sql/<name>.sql``, whose columns are the fields of `row_type`, in any order."""
    text = fill_identifiers(statement(name), **identifiers) if identifiers else statement(name)
    result = connection.execute(text, parameters)
    columns = [column[0] for column in result.description or ()]
    return [row_type(**dict(zip(columns, row, strict=True))) for row in result.fetchall()]


def _key_columns(config: Mapping[str, Any]) -> Sequence[str]:
    """Of the workload, as the run noted them; else what every output table has to tell rows apart."""
    key = config["workload"].get("key") if isinstance(config.get("workload"), dict) else None
    return key if isinstance(key, list) and key else ("content_key",)


def _json_object(text: str | None) -> dict[str, Any]:
    value = json.loads(text) if text else {}
    return value if isinstance(value, dict) else {}
