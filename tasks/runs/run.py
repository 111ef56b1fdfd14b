"""One workload of one night: its folder, its record, and how it ends, whatever ends it."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import Any

from engine.errors import ArtifactError, BatchloomError, DatabaseError
from tasks.runs.crash_isolation import guard
from tasks.runs.lowered_engine import list_engines
from tasks.runs.run_folder import (
    Manifest,
    RunRecord,
    RunStatus,
    create_run_folder,
    discard_run_folder,
    finish_run_folder,
    has_tried_rows,
    list_finished_parts,
    list_finished_steps,
    list_unfinished_runs,
    new_run_id,
    sweep_runs,
    update_manifest,
)
from tasks.runs.run_summary import RunSummary, summarise_run
from tasks.runs.shared_run import recover_shared_run
from tasks.storage.artifact import ArtifactRef
from tasks.workloads.workload import Workload, load_workload
from tasks.write import WriteResult, write, write_answers

LOGGER = logging.getLogger("batchloom")

PACKAGES = ("batchloom", "torch", "transformers", "duckdb", "pyarrow", "prefect")
"""Whose versions a run's record names."""

STOP_LOCK_TIMEOUT_SECONDS = 5.0
"""How long a run that was told to stop waits for the database; what it cannot write, the next run writes."""


class Run:
    """One workload of one night. What is in its folder is always enough to end it from another process.

    Attributes:
        workload: what it does.
    """

    __slots__ = ("_database", "_manifest", "workload")

    def __init__(self, database: str | Path, manifest: Manifest, workload: Workload) -> None:
        self._database = database
        self._manifest = manifest
        self.workload = workload

    @classmethod
    def begin(
        cls, database: str | Path, workload: Workload, model: str, model_digest: str, config: Mapping[str, Any]
    ) -> "Run":
        """Make the folder of a new run; `ArtifactError` where that cannot be."""
        record = RunRecord(
            run_id=new_run_id(workload.name),
            workload=workload.name,
            workload_source=workload.source,
            workload_digest=workload.digest,
            model=model,
            model_digest=model_digest,
            started_at=datetime.now(UTC).isoformat(),
            config=config,
            versions={"python": python_version()} | {name: found for name in PACKAGES if (found := _version(name))},
        )
        return cls(database, create_run_folder(database, record), workload)

    @property
    def folder(self) -> str:
        return self._manifest.folder

    @property
    def config(self) -> Mapping[str, Any]:
        """What is noted of its settings so far."""
        return self._manifest.record.config

    @property
    def plan(self) -> ArtifactRef | None:
        """The plan, once there is one."""
        return self._manifest.artifacts.get("plan")

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Keep the wall time of the block in the record under the stage's name, however the block ends."""
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = {**self._manifest.record.seconds, stage: time.perf_counter() - started}
            self._manifest = update_manifest(self.folder, seconds=seconds)

    def note(self, artifacts: Mapping[str, ArtifactRef], **changes: Any) -> None:
        """Keep references, and fields of the record; durable when this returns."""
        self._manifest = update_manifest(self.folder, artifacts=artifacts, **changes)

    def complete(self) -> RunSummary:
        """Write everything to the database and drop what the folder no longer needs. Raises what `write` raises."""
        return self._end("completed", "", write)

    def stop(self, error: BaseException) -> RunSummary | None:
        """End a run that did not come through: what is finished is written, the rest is left for the next run.

        Told to stop from outside (Ctrl-C, a signal, a cancellation), it is "interrupted", else "failed". A run that
        failed before it gave a row to the model leaves no trace: the error says why, and nothing is half-written. What
        cannot be written now stays in the folder, and the next run of the database writes it.
        """
        is_failed = isinstance(error, Exception)
        if "requests" not in self._manifest.artifacts or (is_failed and not has_tried_rows(self.folder)):
            self._discard()
            return None
        write_now = partial(write_answers, lock_timeout_seconds=STOP_LOCK_TIMEOUT_SECONDS)
        reason = f"{type(error).__name__}: {error}" if is_failed else "told to stop"
        try:
            return self._end("failed" if is_failed else "interrupted", reason, write_now)
        except DatabaseError as why:
            LOGGER.warning("%s: the next run will write what this one finished: %s", self.workload.name, why)
            return None

    def recover(self) -> RunSummary | None:
        """End a run whose process ended without doing so, in the state it had reached."""
        record = self._manifest.record
        if "requests" not in self._manifest.artifacts:
            self._discard()
            return None
        if record.status == "running":
            if has_tried_rows(self.folder):
                guard(self._database, self.workload.name, is_needed=True)
            return self._end("interrupted", "its process ended", write_answers)
        return self._end(record.status, record.error, write_answers)

    def _end(self, status: RunStatus, error: str, write_run: Callable[..., WriteResult]) -> RunSummary:
        config = self._manifest.record.config
        if engines := list_engines(self.folder):
            config = {**config, "engines_with_less_memory": engines}
        self._manifest = update_manifest(self.folder, status=status, error=error, config=config)
        record, artifacts = self._manifest.record, self._manifest.artifacts
        parts, steps = list_finished_parts(self.folder), list_finished_steps(self.folder)
        written = write_run(
            str(self._database), self.workload, record, artifacts.get("requests"), artifacts.get("tokens"), parts, steps
        )
        summary = summarise_run(record, written, parts)
        finish_run_folder(self.folder)
        return summary

    def _discard(self) -> None:
        discard_run_folder(self.folder)


def recover_runs(database: str | Path) -> None:
    """Write what earlier runs finished and never came to write. Call it inside `hold_database`.

    A run whose artifacts are damaged is dropped, so that its rows are answered again. One whose workload cannot be read
    stays where it is. Both are logged as warnings: neither may keep tonight's run from its work.

    Raises:
        DatabaseError: the database is locked, or does not take the answers.
    """
    sweep_runs(database)
    for manifest in list_unfinished_runs(database):
        run_id = manifest.record.run_id
        recover_shared_run(manifest.folder)
        try:
            run = Run(database, manifest, load_workload(manifest.record.workload_source))
            summary = run.recover()
        except DatabaseError:
            raise
        except ArtifactError as error:
            LOGGER.warning("run %s cannot be recovered, its rows will be answered again: %s", run_id, error)
            discard_run_folder(manifest.folder)
        except BatchloomError as error:
            LOGGER.warning("run %s cannot be written, its answers stay in %s: %s", run_id, manifest.folder, error)
        else:
            if summary is not None:
                LOGGER.info("recovered run %s: %s", run_id, summary.text)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
