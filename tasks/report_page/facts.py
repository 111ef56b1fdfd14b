"""Reads the facts about a run, by the statements in ``sql/report/``.

A fact is a row whose fields are the columns of its statement; the header of the statement describes them.
"""

import json
from collections import namedtuple
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import duckdb

from engine.errors import ArtifactError, DatabaseError
from tasks.database.connection import execute
from tasks.database.schema import list_relations
from tasks.storage.artifact import ArtifactRef, open_parquet

NUM_STEP_BINS = 240
NUM_LENGTH_BINS = 14
NUM_SLOWEST = 10
NUM_REASONS = 20

ANSWER_COLUMNS = frozenset(
    ["status", "error", "finish_reason", "run_id", "content_key"]
    + [f"num_{kind}_tokens" for kind in ("prompt", "cached", "output")]
)
"""Columns that every output table has."""

Row = Any
"""A named tuple with the columns of a statement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """All facts that a page shows of one run. The statement of each has its name, unless a comment names another.

    Attributes:
        prediction: name of a column of `totals` (or num_computed_tokens) to its predicted value; empty for none.
    """

    run: Row
    totals: Row  # report/steps/totals
    bins: Sequence[Row] = ()  # report/steps/bins
    utilisation: Sequence[Row] = ()
    engines: Sequence[Row] = ()
    partitions: Sequence[Row] = ()  # report/steps/slowest_partitions
    slow_steps: Sequence[Row] = ()  # report/steps/slowest_steps
    slow_groups: Sequence[Row] = ()  # report/answers/slowest_groups; empty if the run did not note answers' costs
    lengths: Sequence[Row] = ()
    cached_shares: Sequence[Row] = ()
    share_degrees: Sequence[Row] = ()  # report/plan/share_degrees; empty without the plan
    errors: Sequence[Row] = ()
    evaluation: Row | None = None  # only if the run's answers were compared with gold rows, as are the next three
    metrics: Sequence[Row] = ()  # report/evaluation/metrics
    calibration: Sequence[Row] = ()  # report/evaluation/calibration
    confusion: Sequence[Row] = ()  # report/evaluation/confusion
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    prediction: Mapping[str, float]


def count_computed_prompt_tokens(facts: RunFacts) -> int:
    """Prompt tokens that were computed for the run's rows. As planned, where steps also have those of other rows: of
    workloads that were planned with these, or of rows that are left unanswered."""
    if facts.run.is_shared or facts.run.num_unanswered:
        return int(facts.run.num_prompt_tokens - facts.run.num_cached_tokens)
    return int(facts.totals.num_suffix_tokens + facts.totals.num_prefix_tokens)


def read_run(connection: duckdb.DuckDBPyConnection, run_id: str | None = None) -> Row:
    """The row of a run; None for the newest run that had something to do. `DatabaseError` if there is no such run."""
    for run in _read(connection, "run", {"run_id": run_id}):
        return run
    raise DatabaseError("no run in table runs yet" if run_id is None else f"no run {run_id!r} in table runs")


def read_run_facts(connection: duckdb.DuckDBPyConnection, run: Row, plan: ArtifactRef | None = None) -> RunFacts:
    """All facts of a run's page. Makes temporary tables; the database is not changed.

    Args:
        connection: to the run's database.
        run: of `read_run`.
        plan: the run's plan artifact, or None; a missing or damaged file counts as None.
    """
    execute(connection, "report/steps/timeline", {"run_id": run.run_id})
    execute(connection, "report/nice_width")
    execute(connection, "report/plan/no_groups")
    if plan is not None:
        with suppress(ArtifactError):
            open_parquet(plan).close()
            execute(connection, "report/plan/groups", {"plan": plan.path})
    slowest = {"num_rows": NUM_SLOWEST}
    config, versions = _json_object(run.config), _json_object(run.versions)
    prediction, workload = config.get("prediction"), config.get("workload")
    key = workload.get("key") if isinstance(workload, dict) else None
    relations = list_relations(connection)
    tables = [found.table_name for found in _read(connection, "answers/tables", {"columns": sorted(ANSWER_COLUMNS)})]
    return RunFacts(
        run=run,
        totals=_read(connection, "steps/totals")[0],
        bins=_read(connection, "steps/bins", {"num_bins": NUM_STEP_BINS}),
        utilisation=_read(connection, "steps/utilisation"),
        engines=_read(connection, "steps/engines"),
        partitions=_read(connection, "steps/slowest_partitions", slowest),
        slow_steps=_read(connection, "steps/slowest_steps", slowest),
        share_degrees=_read(connection, "plan/share_degrees"),
        config=config,
        versions={name: str(found) for name, found in versions.items()},
        prediction=prediction if isinstance(prediction, dict) else {},
        **(_read_evaluation(connection, run.run_id) if "evaluations" in relations else {}),
        # Without a known key, rows are named by content_key, which every output table has.
        **_read_answers(connection, tables, run.run_id, key if isinstance(key, list) and key else ["content_key"]),
    )


def _read_answers(
    connection: duckdb.DuckDBPyConnection, tables: Sequence[str], run_id: str, keys: Sequence[str]
) -> dict[str, Any]:
    """Facts from the output table with rows of this run, if there is one; reads report_plan_groups."""
    this_run = {"run_id": run_id}
    for table in tables:
        if execute(connection, "report/answers/exist", this_run, table=table).fetchall()[0][0]:
            slowest = {**this_run, "num_rows": NUM_SLOWEST}
            return {
                "lengths": _read(connection, "answers/lengths", {**this_run, "num_bins": NUM_LENGTH_BINS}, table=table),
                "cached_shares": _read(connection, "answers/cached_shares", this_run, table=table),
                "errors": _read(connection, "answers/errors", {**this_run, "num_rows": NUM_REASONS}, table=table),
                "slow_groups": _read(connection, "answers/slowest_groups", slowest, table=table, keys=keys),
            }
    return {}


def _read_evaluation(connection: duckdb.DuckDBPyConnection, run_id: str) -> dict[str, Any]:
    """Facts from the run's newest evaluation, if there is one."""
    for evaluation in _read(connection, "evaluation/summary", {"run_id": run_id}):
        this = {"evaluation_id": evaluation.evaluation_id}
        names = ("metrics", "calibration", "confusion")
        return {"evaluation": evaluation} | {name: _read(connection, f"evaluation/{name}", this) for name in names}
    return {}


def _read(
    connection: duckdb.DuckDBPyConnection,
    name: str,
    parameters: Mapping[str, Any] | None = None,
    **identifiers: str | Sequence[str],
) -> list[Row]:
    """The rows of ``sql/report/<name>.sql``."""
    result = execute(connection, f"report/{name}", parameters, **identifiers)
    row_type = namedtuple(name.split("/")[-1], [column[0] for column in result.description or ()])  # type: ignore[misc]
    return [row_type(*row) for row in result.fetchall()]


def _json_object(text: str | None) -> dict[str, Any]:
    value = json.loads(text) if text else {}
    return value if isinstance(value, dict) else {}
