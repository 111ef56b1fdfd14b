"""Writes a run's answers to its database in one transaction; writing a run again replaces its rows."""

import json
import time
from collections.abc import Sequence
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

import duckdb
from prefect import task
from prefect.cache_policies import NO_CACHE

from engine.errors import ArtifactError
from tasks.database.attach import reads_attachments
from tasks.database.connection import MEMORY_LIMIT, connect, execute, fetch_rows, restrict_sql, transaction
from tasks.database.schema import check_schema, create_schema
from tasks.partitions.part import part_schema
from tasks.runs.run import Run
from tasks.runs.run_record import RunRecord
from tasks.runs.run_summary import RunSummary
from tasks.storage.artifact import ArtifactRef, open_parquet, runs_folder
from tasks.workloads.workload import Workload

STAGES = ("read", "tokenize", "plan", "infer")
FROM_RECORD = (
    *("run_id", "workload", "workload_digest", "model", "model_digest", "started_at", "status", "num_already_done"),
    *("token_saving_ratio", "best_token_saving_ratio"),
)
"""Columns of the table ``runs`` that are fields of a `RunRecord`."""


def write_run(
    run: Run, workload: Workload, *, lock_timeout_seconds: float = 180.0, is_recovered: bool = False
) -> RunSummary:
    """Replace the run's rows in the database by those of its artifacts, complete parts and step records.

    All in one transaction. Rows with an error in requests or tokens become error rows (finish_reason "invalid"). Rows
    that no part answers are not written and stay to be done. DuckDB reads the Parquet files itself, so that memory
    stays bounded. Rows that are written again keep their first created_at.

    Args:
        run: may have ended before it had tokenized or read; then it has no such artifact.
        lock_timeout_seconds: how long to wait while another process has the database open.
        is_recovered: the run ended before now, with its last step.
    Raises:
        ArtifactError: an artifact is missing or damaged, or cannot be read; raised before the database is opened.
        DatabaseError: locked for longer than `lock_timeout_seconds`, or an error of SQL; nothing is written then.
    """
    started = time.perf_counter()
    database, record = run.database, run.record
    requests, tokens = run.artifacts.get("requests"), run.artifacts.get("tokens")
    parts, steps = run.list_parts(), run.list_steps()
    refs = [ref for ref in (requests, tokens, *parts, *steps) if ref is not None]
    for ref in refs:
        open_parquet(ref).close()
    attach = record.config.get("attach", {})
    with connect(database, lock_timeout_seconds=lock_timeout_seconds, memory_limit=MEMORY_LIMIT) as connection:
        restrict_sql(connection, [runs_folder(database)], attach, paths=[ref.path for ref in refs])
        is_foreign = bool(attach) and reads_attachments(connection, workload)
        with transaction(connection):
            check_schema(connection, workload, str(database))  # tables may have changed since they were read
            create_schema(connection, workload, is_foreign=is_foreign)
            _replace_answers(connection, workload, record, requests, tokens, parts)
            return _replace_run(connection, workload, record, requests, steps, started, is_recovered)


write = task(
    name="write", retries=0, cache_policy=NO_CACHE, persist_result=False, task_run_name="write-{workload.name}"
)(write_run)
"""`write_run` as a task. It waits for a lock itself; whatever else fails once fails again."""


def _replace_answers(
    connection: duckdb.DuckDBPyConnection,
    workload: Workload,
    run: RunRecord,
    requests: ArtifactRef | None,
    tokens: ArtifactRef | None,
    parts: Sequence[ArtifactRef],
) -> None:
    kind = workload.kind
    this_run = {"run_id": run.run_id}
    names: dict[str, Any] = {
        "table": workload.output.table,
        "rank_within": kind.rank_within,
        "keys": workload.key,
        "part_columns": list(kind.written.values()),
        "types": {name: kind.columns[name] for name in kind.written},
    }
    time_of_run = this_run | {"started_at": run.started_at, "now": datetime.now(UTC)}
    created_at = execute(connection, "write/run_created_at", time_of_run, **names).fetchall()[0][0]
    execute(connection, "write/delete_run_rows", this_run, **names)
    if requests is None:
        return
    row = {"requests": requests.path, "keys": list(workload.key), "model": run.model, "created_at": created_at}
    row |= this_run
    paths = [ref.path for ref in parts]
    refused = (requests,) if kind.question_digests else (requests, tokens)
    errors = {"errors": [ref.path for ref in refused if ref]}
    execute(connection, "write/insert_invalid_rows", row | errors, **names)
    if kind.question_digests:
        asked = run.config.get("workload", {}).get("questions")  # runs of an earlier version have only a digest of all
        if asked != list(kind.question_digests.values()) if asked else run.workload_digest != workload.digest:
            raise ArtifactError(f"the questions of {workload.source} were changed since run {run.run_id} asked them")
        from tasks.database.decisions import insert_decisions  # imported only when needed

        if tokens:
            insert_decisions(connection, workload, row, tokens.path, paths, part_schema(kind))
    elif parts:
        execute(connection, "write/insert_answers", row | {"parts": paths, "is_typed": kind.is_typed}, **names)
    if kind.rank_within:
        execute(connection, "write/rank_answers", this_run, **names)


def _replace_run(
    connection: duckdb.DuckDBPyConnection,
    workload: Workload,
    run: RunRecord,
    requests: ArtifactRef | None,
    steps: Sequence[ArtifactRef],
    started: float,
    is_recovered: bool,
) -> RunSummary:
    """Replace the run's row and its steps."""
    this_run = {"run_id": run.run_id}
    for table in ("steps", "runs"):
        execute(connection, "write/delete_run_rows", this_run, table=table)
    if steps:
        execute(connection, "write/insert_steps", this_run | {"steps": [ref.path for ref in steps]})
    (totals,) = fetch_rows(execute(connection, "write/run_totals", this_run, table=workload.output.table))
    last_step_at = totals.pop("last_step_at") or run.started_at
    num_rows, infer_seconds = requests.num_rows if requests else 0, run.seconds.get("infer", 0.0)
    num_tokens = totals["num_prompt_tokens"] + totals["num_output_tokens"]
    row = {name: getattr(run, name) for name in FROM_RECORD} | totals
    row |= {
        "error": run.error or None,
        "finished_at": last_step_at if is_recovered else datetime.now(UTC),
        "num_rows": num_rows,
        "num_unanswered": num_rows - totals["num_ok"] - totals["num_errors"],
        "tokens_per_second": num_tokens / infer_seconds if infer_seconds and not run.shared_with else None,
        "write_seconds": time.perf_counter() - started,
        "shared_with": json.dumps(dict(run.shared_with)) if run.shared_with else None,
        "config": json.dumps(dict(run.config)),
        "versions": json.dumps(dict(run.versions)),
        **{f"{stage}_seconds": run.seconds.get(stage) for stage in STAGES},
    }
    execute(connection, "write/insert_rows", {"rows": [row]}, table="runs")
    best_ratio = None if run.shared_with else run.best_token_saving_ratio
    shown = row | {"best_token_saving_ratio": best_ratio, "infer_seconds": infer_seconds}
    shown["is_full"] = run.config.get("full", False)
    return RunSummary(**{field.name: shown[field.name] for field in fields(RunSummary)})
