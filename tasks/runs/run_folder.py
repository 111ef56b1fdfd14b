"""The folder of one run: its artifacts and a manifest, so that what is finished survives whatever ends the run."""

import json
import re
import secrets
import shutil
import string
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from engine.errors import ArtifactError
from tasks.runs.shared_run import drop_shared_run
from tasks.storage.artifact import ArtifactRef, describe_parquet, replace_file

RUN_ID = re.compile(r"\d{8}T\d{6}-[A-Za-z0-9_-]+-[0-9a-f]{6}")
"""What `new_run_id` gives."""

WORK_FOLDERS = ("parts", "attempts", "engines", "progress")
REQUESTS = "requests.parquet"

RunStatus = Literal["running", "completed", "interrupted", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What the table ``runs`` says of a run, apart from the counts that SQL takes from the rows.

    Attributes:
        run_id: one per flow run and workload.
        workload: its name.
        workload_source: what `load_workload` takes.
        workload_digest: of prompt, decoding and labels.
        model: as the user named it.
        model_digest: of the checkpoint.
        started_at: ISO 8601 with an offset.
        status: "running" until the answers are written.
        error: why a run failed or was interrupted; empty otherwise.
        num_already_done: rows that an earlier run had answered.
        seconds: stage (read, tokenize, plan, infer) to wall seconds; the write measures itself.
        token_saving_ratio: of the plan, Eq. 2 of BatchLLM, 0 to 1; None before there is a plan.
        best_token_saving_ratio: the best that any sharing could reach.
        config: settings of engine and flow, JSON values.
        versions: package to version.
    """

    run_id: str
    workload: str
    workload_source: str
    workload_digest: str
    model: str
    model_digest: str
    started_at: str
    status: RunStatus = "running"
    error: str = ""
    num_already_done: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    token_saving_ratio: float | None = None
    best_token_saving_ratio: float | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a run folder holds.

    Attributes:
        folder: absolute path.
        record: the run.
        artifacts: name ("requests", "tokens", "plan") to reference. Parts are found by `list_finished_parts`.
        is_written: the answers are in the database.
    """

    folder: str
    record: RunRecord
    artifacts: Mapping[str, ArtifactRef] = field(default_factory=dict)
    is_written: bool = False


def runs_folder(database: str | Path) -> Path:
    """Where the runs of a database lie: beside the file, links followed, so that one file has one folder."""
    path = Path(database).resolve()
    return path.with_name(path.name + ".runs")


def private_root(database: str | Path) -> Path:
    """`runs_folder`, made where it is not there, readable by its owner alone; `ArtifactError` where that cannot be."""
    root = runs_folder(database)
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        root.chmod(0o700)
    except OSError as error:
        raise ArtifactError(f"run folder {root} cannot be made: {error}") from error
    return root


def new_run_id(workload: str) -> str:
    """A run id that sorts by start, names its workload, and is never given twice."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{workload}-{secrets.token_hex(3)}"


def create_run_folder(database: str | Path, record: RunRecord) -> Manifest:
    """Make ``<database>.runs/<run_id>/`` with ``parts/`` and ``steps/``, readable by its owner alone (0700).

    Raises:
        ArtifactError: the run id is no plain name, the folder exists, or it cannot be made.
    """
    allowed = set(string.ascii_letters + string.digits + "._-")
    if not record.run_id or not set(record.run_id) <= allowed or record.run_id.startswith("."):
        raise ArtifactError(f"a run id holds letters, digits, '.', '_' and '-' only, got {record.run_id!r}")
    root = private_root(database)
    folder = root / record.run_id
    try:
        folder.mkdir(mode=0o700)
        (folder / "parts").mkdir(mode=0o700)
        (folder / "steps").mkdir(mode=0o700)
    except OSError as error:
        raise ArtifactError(f"run folder {folder} cannot be made: {error}") from error
    return save_manifest(Manifest(folder=str(folder), record=record))


def save_manifest(manifest: Manifest) -> Manifest:
    """Write ``manifest.json``, whole or not at all (then `ArtifactError`); returns its argument."""
    path = Path(manifest.folder) / "manifest.json"
    value = {
        "record": asdict(manifest.record),
        "artifacts": {name: ref.to_json() for name, ref in manifest.artifacts.items()},
        "is_written": manifest.is_written,
    }
    with replace_file(path) as file:
        file.write(json.dumps(value, indent=1, sort_keys=True).encode())
    return manifest


def load_manifest(folder: str | Path) -> Manifest:
    """Read a run folder's manifest; `ArtifactError` where it is missing or not one of ours."""
    path = Path(folder) / "manifest.json"
    try:
        value = json.loads(path.read_bytes())
        record = RunRecord(**value["record"])
        if record.status not in get_args(RunStatus):
            raise ValueError(f"unknown status {record.status!r}")
        return Manifest(
            folder=str(Path(folder).absolute()),
            record=record,
            artifacts={name: ArtifactRef.from_json(ref) for name, ref in value["artifacts"].items()},
            is_written=bool(value["is_written"]),
        )
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ArtifactError(f"{path} is not a run's manifest: {error!r}") from error


def update_manifest(
    folder: str | Path, *, artifacts: Mapping[str, ArtifactRef] | None = None, **changes: Any
) -> Manifest:
    """Change fields of the run's record and add artifacts, on disk and in the returned manifest."""
    manifest = load_manifest(folder)
    return save_manifest(
        replace(
            manifest,
            record=replace(manifest.record, **changes),
            artifacts={**manifest.artifacts, **(artifacts or {})},
        )
    )


def finish_run_folder(folder: str | Path, **changes: Any) -> Manifest:
    """Mark a run as written and delete what only the run itself needed.

    Call it after `write_answers` returned. Kept: the manifest and ``steps/`` (a few kilobytes a step, for reports).
    Deleted: requests, tokens, plan and parts, which hold the prompts' text and are in the database or can be rebuilt.
    """
    manifest = load_manifest(folder)
    manifest = save_manifest(
        replace(
            manifest,
            record=replace(manifest.record, **changes),
            artifacts={name: ref for name, ref in manifest.artifacts.items() if name == "plan"},
            is_written=True,
        )
    )
    _drop_work(Path(folder))
    return manifest


def list_unfinished_runs(database: str | Path) -> list[Manifest]:
    """Runs whose answers are not in the database yet, oldest first; folders without a readable manifest are no runs.

    Call it inside `hold_database`, else a run that is still alive is listed too.
    """
    manifests = []
    for path in sorted(runs_folder(database).glob("*/manifest.json")):
        try:
            manifest = load_manifest(path.parent)
        except ArtifactError:
            continue
        if not manifest.is_written:
            manifests.append(manifest)
    return manifests


def sweep_runs(database: str | Path) -> None:
    """Delete what killed processes left undeleted; call it inside `hold_database`.

    That is the folder of a run that had no manifest yet, and the work of a run that is in the database.
    """
    for folder in runs_folder(database).iterdir():
        if RUN_ID.fullmatch(folder.name) is None:
            continue
        if not (folder / "manifest.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
        elif any((folder / name).exists() for name in (*WORK_FOLDERS, REQUESTS, "exchange")) and _is_written(folder):
            _drop_work(folder)


def discard_run_folder(folder: str | Path) -> None:
    """Delete all that there is of a run."""
    drop_shared_run(folder)
    shutil.rmtree(folder, ignore_errors=True)


def list_finished_parts(folder: str | Path) -> list[ArtifactRef]:
    """References of the parts that are whole, by name; damaged or half-written ones count as absent."""
    return keep_whole(sorted(Path(folder).glob("parts/part-*.parquet")))


def list_finished_steps(folder: str | Path) -> list[ArtifactRef]:
    """References of the step records that are whole, by name."""
    return keep_whole(sorted(Path(folder).glob("steps/part-*.parquet")))


def keep_whole(paths: Iterable[Path]) -> list[ArtifactRef]:
    """References of the files that are there and whole."""
    refs = []
    for path in paths:
        try:
            refs.append(describe_parquet(path))
        except ArtifactError:
            continue
    return refs


def has_tried_rows(folder: str | Path) -> bool:
    """Whether the run came as far as giving rows to the model."""
    return any(next((Path(folder) / name).glob("part-*"), None) for name in ("attempts", "parts"))


def _is_written(folder: Path) -> bool:
    try:
        return load_manifest(folder).is_written
    except ArtifactError:
        return False


def _drop_work(folder: Path) -> None:
    """Delete what only the run itself needed. The requests go last: while they are there, `sweep_runs` looks again."""
    drop_shared_run(folder)
    for path in folder.rglob("*.tmp"):
        path.unlink(missing_ok=True)
    for name in WORK_FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
    for path in sorted(folder.glob("*.parquet"), key=lambda path: path.name == REQUESTS):
        path.unlink(missing_ok=True)
