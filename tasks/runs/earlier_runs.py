"""Folders of earlier runs: deleting what killed processes left behind."""

import re
import shutil
from contextlib import suppress
from pathlib import Path

from engine.errors import ArtifactError
from tasks.runs.run import REQUESTS, WORK_FOLDERS, Run, drop_work
from tasks.storage.artifact import runs_folder

RUN_ID = re.compile(r"\d{8}T\d{6}-[A-Za-z0-9_-]+-[0-9a-f]{6}")
"""What `new_run_id` gives."""


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
            run = Run.load(database, folder)
            if not run.is_written:
                unfinished.append(run)
            elif is_ours and _has_work(folder):
                drop_work(folder)
    return unfinished


def _has_work(folder: Path) -> bool:
    is_left = any((folder / name).exists() for name in (*WORK_FOLDERS, REQUESTS, "exchange"))
    return is_left or any(folder.glob(".*.tmp"))
