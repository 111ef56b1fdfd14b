"""Ends runs that failed or were interrupted: finished answers are written, other rows are left for the next run."""

import logging
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

from engine.errors import ArtifactError, BatchloomError, DatabaseError, UnreadableError
from tasks.database.messages import is_of_file
from tasks.runs.run import REQUESTS, WORK_FOLDERS, Run, drop_work, isolation_mark, use_exchange
from tasks.runs.run_record import RunRecord
from tasks.storage.artifact import runs_folder
from tasks.workloads.model_use import bind_again
from tasks.workloads.workload import Workload, load_workload
from tasks.write import write_run

LOGGER = logging.getLogger("batchloom")

RUN_ID = re.compile(r"\d{8}T\d{6}-[A-Za-z0-9_-]+-[0-9a-f]{6}")
"""What `new_run_id` gives."""

LEFT_FILES = (REQUESTS, "exchange", ".*.tmp")
"""Files that only an unfinished run has."""

KEEP_DAYS = 7
"""Artifacts in the cache that no run has used for this long are deleted."""

STAYS = "run %s cannot be written, its answers stay in %s: %s"
OUT_OF_REACH = "what its workers have answered is out of reach"

STOP_LOCK_TIMEOUT_SECONDS = 5.0
"""How long a stopped run waits for the database; answers that it cannot write are written by the next run."""


def stop_run(run: Run, workload: Workload, error: BaseException) -> None:
    """End a run after an `error`, which the caller raises again. It becomes "interrupted" if it was stopped from
    outside (Ctrl-C, a signal, a cancellation), else "failed". A run that failed before it gave a row to the model is
    discarded: the error says why. Answers that cannot be written now are left to the next run. See `recover_runs`."""
    is_failed, is_taken = isinstance(error, Exception), use_exchange(run.folder, lambda exchange: exchange.take())
    if not _is_judged(run) or (is_failed and is_taken and not _has_tried_rows(run)):
        discard(run.folder)
        return
    if is_failed:
        run.end("failed", f"{type(error).__name__}: {error}")
    else:
        run.end("interrupted", "told to stop")
    if not is_taken:
        LOGGER.warning(STAYS, run.record.run_id, run.folder, OUT_OF_REACH)
        return
    try:
        summary = write_run(run, workload, lock_timeout_seconds=STOP_LOCK_TIMEOUT_SECONDS)
    except (DatabaseError, UnreadableError) as why:
        LOGGER.warning("%s: the next run will write what this one finished: %s", workload.name, why)
        return
    run.finish()
    LOGGER.info(summary.text)


def discard(folder: Path) -> None:
    """Delete all files of a run. Where its copy in an object store is out of reach, the file ``exchange`` stays, and
    `sweep_runs` tries again."""
    with suppress(OSError):
        (folder / "manifest.json").unlink(missing_ok=True)
    drop_work(folder)
    if not (folder / "exchange").exists():
        shutil.rmtree(folder, ignore_errors=True)


def recover_runs(database: Path) -> list[Run]:
    """Write answers that earlier runs finished but did not write; returns these runs, if they had rows to answer.

    Call it inside `hold_database`, see `sweep_runs`. A run with damaged artifacts, or with other columns than its
    workload has now, is discarded, so that its rows are answered again. A run whose workload or files cannot be
    read, whose exchange is out of reach, or whose answers do not fit the tables, stays as it is. Both are warnings.
    Raises `DatabaseError` if the database is locked, its file cannot be written, or DuckDB has too little memory for
    it, `ArtifactError` if a run's folder cannot be written.
    """
    written = []
    for run in sweep_runs(database):
        run_id = run.record.run_id
        if not use_exchange(run.folder, lambda exchange: exchange.take()):
            LOGGER.warning(STAYS, run_id, run.folder, OUT_OF_REACH)
            continue
        if not _is_judged(run):
            discard(run.folder)
            continue
        if run.record.status == "running":
            if _has_tried_rows(run):
                isolation_mark(run.database, run.record.workload).touch(mode=0o600)
            run.end("interrupted", "its process ended")
        try:
            workload = load_workload(run.record.workload_source)
            if workload.prompt.layout == "auto":
                from tasks.layouts.kept import use_kept

                workload = use_kept(run.database, workload)
            workload = bind_again(workload, run.record.model, run.record.model_digest)
            _check_answers(workload, run.record)
            summary = write_run(run, workload, is_recovered=True)
        except BatchloomError as error:
            if is_of_file(error):
                raise
            if isinstance(error, ArtifactError) and not isinstance(error, UnreadableError):
                LOGGER.warning("run %s cannot be recovered, its rows will be answered again: %s", run_id, error)
                discard(run.folder)
            else:
                LOGGER.warning(STAYS, run_id, run.folder, error)
        else:
            run.finish()
            LOGGER.info("recovered run %s: %s", run_id, summary.text)
            if summary.num_rows:
                written.append(run)
    return written


def sweep_runs(database: str | Path) -> list[Run]:
    """Delete files of runs whose process was killed; call it inside `hold_database`, so that no run is alive. These are
    folders of runs without manifest and report, and of runs whose answers are in the database, work folders and
    half-written files. Returns the runs whose answers are not in the database yet, oldest first. One whose manifest
    cannot be read stays as it is, with a warning."""
    unfinished = []
    for folder in sorted(runs_folder(database).glob("*")):
        is_ours = RUN_ID.fullmatch(folder.name) is not None
        if not _may_exist(folder / "manifest.json"):
            if is_ours and not (folder / "report.html").exists():  # a report may be made again in a new folder
                discard(folder)
            continue
        try:
            run = Run.load(database, folder)
        except ArtifactError as error:
            if _has_work(folder):
                LOGGER.warning(STAYS, folder.name, folder, error)
            continue
        if not run.is_written:
            unfinished.append(run)
        elif is_ours and _has_work(folder):
            drop_work(folder)
    return unfinished


def prune_cache(database: str | Path) -> None:
    """Delete cached artifacts that no run has used for `KEEP_DAYS`, except those of runs whose answers are not in the
    database yet, and temporary files of killed processes as old. Nothing while such a run's manifest cannot be read.
    Other processes may do so at the same time."""
    folder, old = runs_folder(database) / "cache", list[Path]()
    for path in (*folder.glob("*.parquet"), *folder.glob(".*.tmp"), *folder.glob("duckdb_temp_*")):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > KEEP_DAYS * 86400:
                old.append(path)
    needed = set()
    for manifest in runs_folder(database).glob("*/manifest.json") if old else ():
        try:
            run = Run.load(database, manifest.parent)
        except ArtifactError:
            if _has_work(manifest.parent):
                return
            continue
        if not run.is_written:
            needed |= {Path(ref.path).name for ref in run.artifacts.values()}
    for path in old:
        if path.name not in needed:
            path.unlink(missing_ok=True)


def _may_exist(path: Path) -> bool:
    """Whether a file is there, or it cannot be said."""
    try:
        path.stat()
    except OSError as error:
        return not isinstance(error, (FileNotFoundError, NotADirectoryError))
    return True


def _has_work(folder: Path) -> bool:
    """Whether a run's folder has files that only an unfinished run needs."""
    return any(next(folder.glob(name), None) for name in (*WORK_FOLDERS, *LEFT_FILES))


def _is_judged(run: Run) -> bool:
    """Whether the run has read its rows and, where it limits the share of invalid ones, has passed that check."""
    if (requests := run.artifacts.get("requests")) is None:
        return False
    limit = run.record.config.get("failures", {}).get("max_invalid_rate", 1.0)
    return limit == 1 or "plan" in run.artifacts or not requests.num_rows


def _has_tried_rows(run: Run) -> bool:
    """Whether the run gave rows to the model."""
    return any(next((run.folder / name).glob("part-*"), None) for name in ("attempts", "parts"))


def _check_answers(workload: Workload, record: RunRecord) -> None:
    """Raise `ArtifactError` if its workload's answers have other columns now than the run's."""
    then = record.config.get("workload", {})
    for what, found in {"key": list(workload.key), "columns": dict(workload.kind.columns)}.items():
        if then.get(what, found) != found:
            raise ArtifactError(f"the {what} of the answers were changed in {workload.source}: they were {then[what]}")
