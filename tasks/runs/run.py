"""A run, one workload of one night: its folder and manifest, from which another process can finish it."""

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from secrets import token_hex
from typing import TYPE_CHECKING, Any, get_args

from prefect.settings import PREFECT_LOCAL_STORAGE_PATH
from pydantic import TypeAdapter

from engine.errors import ArtifactError, DatabaseError, UnreadableError
from tasks.runs.run_record import RunRecord, RunStatus
from tasks.runs.source import Source
from tasks.storage.artifact import ArtifactRef, list_whole, replace_file, runs_folder, writing
from tasks.workloads.workload import Workload

if TYPE_CHECKING:
    from tasks.runs.run_exchange import RunExchange

WORK_FOLDERS = ("parts", "attempts", "engines", "progress")
REQUESTS = "requests.parquet"

PACKAGES = ("batchloom", "torch", "transformers", "duckdb", "pyarrow", "prefect")
"""Packages whose versions a run's record holds."""


def make_runs_folder(database: str | Path) -> Path:
    """Make `runs_folder` if it is missing, readable by its owner alone; `ArtifactError` if that fails."""
    root = runs_folder(database)
    with writing(root):
        root.mkdir(mode=0o700, exist_ok=True)
        root.chmod(0o700)
    return root


def protect_result_storage() -> None:
    """Make Prefect's local result storage private (0700). Prefect pickles errors of failed flow runs there; whoever
    could write there could run code in a process that reads."""
    storage = Path(PREFECT_LOCAL_STORAGE_PATH.value())
    storage.mkdir(mode=0o700, parents=True, exist_ok=True)
    storage.chmod(0o700)


@contextmanager
def hold_database(database: str | Path, *, is_written: bool = True) -> Iterator[None]:
    """Lock the database against other runs during the block; the kernel releases the lock however the process ends.
    Raises `DatabaseError` if another run holds the lock (its process id is named), or the database `is_written` and its
    file or folder, where DuckDB's log is, cannot be; `ArtifactError` if the lock cannot be written."""
    if is_written and not all(os.access(path, os.W_OK) for path in (database, runs_folder(database).parent)):
        raise DatabaseError(f"{database} cannot be written: the file, its folder or its file system is read-only")
    path = make_runs_folder(database) / "lock"
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = file.read().strip() or "unknown"
            raise DatabaseError(f"another run works on {database} (process id {holder}); one at a time") from error
        except OSError as error:
            raise ArtifactError(
                f"{path} cannot be locked: {error.strerror}; runs need a file system that can"
            ) from error
        with writing(path):
            file.truncate(0)
            os.write(file.fileno(), f"{os.getpid()}\n".encode())
        yield


def isolation_mark(database: str | Path, workload: str) -> Path:
    """An empty file, which exists if the workload's next run needs crash isolation, an engine in a process of its own:
    after a run died while it tried rows, until a run tries all its rows without such a death. A row that crashes an
    engine's own process becomes an error row; in the flow's process it would crash every night."""
    return runs_folder(database) / f"guarded-{workload}"


@dataclass(eq=False)
class Run:
    """The state of a run, kept in its folder so that another process can end the run.

    Attributes:
        folder: absolute path: ``<database>.runs/<run_id>``, readable by its owner alone (0700).
        artifacts: name ("requests", "tokens", "plan") to reference.
        is_written: the answers are in the database.
    """

    database: str | Path
    folder: Path
    record: RunRecord
    artifacts: dict[str, ArtifactRef] = field(default_factory=dict)
    is_written: bool = False

    @classmethod
    def begin(cls, source: Source, workload: Workload, config: Mapping[str, Any], root: Path | None = None) -> "Run":
        """A run that starts now. See `RunRecord` and `create`."""
        record = RunRecord(
            run_id=new_run_id(workload.name),
            workload=workload.name,
            workload_source=workload.source,
            workload_digest=workload.digest,
            model=source.model,
            model_digest=source.model_digest,
            started_at=datetime.now(UTC).isoformat(),
            config=config,
            versions={"python": python_version()} | {name: found for name in PACKAGES if (found := _version(name))},
        )
        return cls.create(source.database, record, root)

    @classmethod
    def create(cls, database: str | Path, record: RunRecord, root: Path | None = None) -> "Run":
        """A new run with its folder in `root`. See `runs_folder` for where it is else. Raises `ArtifactError` if the
        run id is no plain name, or the folder exists or cannot be made."""
        run_id = record.run_id
        if not re.fullmatch(r"(?!\.)[A-Za-z0-9._-]+", run_id):
            raise ArtifactError(f"a run id holds letters, digits, '.', '_' and '-' only, got {run_id!r}")
        folder = (root or make_runs_folder(database)) / run_id
        with writing(folder):
            for path in (folder, folder / "parts", folder / "steps"):
                path.mkdir(mode=0o700)
        run = cls(database, folder.absolute(), record)
        run._save()
        return run

    @classmethod
    def load(cls, database: str | Path, folder: Path) -> "Run":
        """The run of a folder; `ArtifactError` if its manifest is not one of ours, or cannot be read."""
        path = folder / "manifest.json"
        try:
            value = json.loads(path.read_bytes())
            record = RunRecord(**value["record"])
            if record.status not in get_args(RunStatus):
                raise ValueError(f"unknown status {record.status!r}")
            artifacts = TypeAdapter(dict[str, ArtifactRef]).validate_python(value["artifacts"])
            return cls(database, folder.absolute(), record, artifacts, bool(value["is_written"]))
        except OSError as error:
            raise UnreadableError(f"{path} cannot be read: {error}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ArtifactError(f"{path} is not a run's manifest: {error!r}") from error

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Note the wall time of the block as the stage's seconds, however the block ends."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.note(seconds={**self.record.seconds, stage: time.perf_counter() - started})

    def note(self, artifacts: Mapping[str, ArtifactRef] | None = None, **changes: Any) -> None:
        """Add artifacts and change fields of the record; durable when this returns, else `ArtifactError`."""
        self.record = replace(self.record, **changes)
        self.artifacts |= artifacts or {}
        self._save()

    def end(self, status: RunStatus, error: str = "") -> None:
        """Note how the run ended, before its answers are written."""
        config = dict(self.record.config)
        if (self.folder / "engines").exists():
            from tasks.runs.engine_notes import read_notes  # imported only when needed

            config |= read_notes(self.folder)
        self.note(status=status, error=error, config=config)

    def finish(self) -> None:
        """Note that the answers are in the database, and delete the files that only the run itself needed: they hold
        the prompts' text. The manifest and ``steps/`` stay, for reports."""
        self.artifacts = {name: ref for name, ref in self.artifacts.items() if name == "plan"}
        self.is_written = True
        self._save()
        drop_work(self.folder)

    def list_parts(self) -> list[ArtifactRef]:
        """References of the complete parts, sorted by name. See `list_whole`."""
        return list_whole(sorted(self.folder.glob("parts/part-*.parquet")))

    def list_steps(self) -> list[ArtifactRef]:
        """References of the complete files of step records, sorted by name. See `list_whole`."""
        return list_whole(sorted(self.folder.glob("steps/part-*.parquet")))

    def _save(self) -> None:
        value = {name: given for name, given in asdict(self).items() if name not in ("database", "folder")}
        with replace_file(self.folder / "manifest.json") as file:
            file.write(json.dumps(value, indent=1, sort_keys=True).encode())


def new_run_id(workload: str) -> str:
    """A unique run id that sorts by start and names the workload."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{workload}-{token_hex(3)}"


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def drop_work(folder: Path) -> None:
    """Delete the files that only a run itself needed. Requests go last: `sweep_runs` sees that it was interrupted."""
    use_exchange(folder, lambda exchange: exchange.drop())
    for name in WORK_FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
    artifacts = sorted(folder.glob("*.parquet"), key=lambda path: path.name == REQUESTS)
    for path in (*folder.rglob("*.tmp"), folder / "overdue", *artifacts):
        path.unlink(missing_ok=True)


def use_exchange(folder: Path, act: Callable[["RunExchange"], None]) -> bool:
    """Call `act` with the run's copy in an object store, if it has one. False, with a warning: it is out of reach."""
    if not (folder / "exchange").exists():
        return True
    from tasks.runs.run_exchange import is_reached  # imported only when needed

    return is_reached(folder, act)
