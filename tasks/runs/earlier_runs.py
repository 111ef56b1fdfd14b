"""Folders of earlier runs: reading their manifests, and deleting what killed processes left behind."""

import json
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import get_args

from pydantic import TypeAdapter

from engine.errors import ArtifactError
from tasks.runs.run import REQUESTS, WORK_FOLDERS, Run, drop_work
from tasks.runs.run_record import RunRecord, RunStatus
from tasks.storage.artifact import ArtifactRef, runs_folder

RUN_ID = re.compile(r"\d{8}T\d{6}-[A-Za-z0-9_-]+-[0-9a-f]{6}")
"""What `new_run_id` gives."""


def load_run(database: str | Path, folder: Path) -> Run:
    """The run of a folder; `ArtifactError` if its manifest is missing or not one of ours."""
    path = folder / "manifest.json"
    try:
        value = json.loads(path.read_bytes())
        record = RunRecord(**value["record"])
        if record.status not in get_args(RunStatus):
            raise ValueError(f"unknown status {record.status!r}")
        artifacts = TypeAdapter(dict[str, ArtifactRef]).validate_python(value["artifacts"])
        return Run(database, str(folder.absolute()), record, artifacts, bool(value["is_written"]))
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ArtifactError(f"{path} is not a run's manifest: {error!r}") from error


def sweep_runs(database: str | Path) -> list[Run]:
    """Delete files of runs whose process was killed; call it inside `hold_database`, so that no run is alive. These are
    folders of runs without a manifest, and of runs whose answers are in the database, work folders and half-written
    files. Returns the runs whose answers are not in the database yet, oldest first."""
    unfinished = []
    for folder in sorted(runs_folder(database).glob("*")):
        is_ours = RUN_ID.fullmatch(folder.name) is not None
        if not (folder / "manifest.json").exists():
            if is_ours:
                shutil.rmtree(folder, ignore_errors=True)
            continue
        with suppress(ArtifactError):
            run = load_run(database, folder)
            if not run.is_written:
                unfinished.append(run)
            elif is_ours and _has_work(folder):
                drop_work(folder)
    return unfinished


def _has_work(folder: Path) -> bool:
    is_left = any((folder / name).exists() for name in (*WORK_FOLDERS, REQUESTS, "exchange"))
    return is_left or any(folder.glob(".*.tmp"))
