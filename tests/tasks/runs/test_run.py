"""What a run leaves on disk: private, whole, and enough to write its answers after it was killed."""

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from engine.errors import ArtifactError, DatabaseError
from tasks.recover import sweep_runs
from tasks.runs.run import Run, hold_database, new_run_id
from tasks.runs.run_record import RunRecord
from tasks.storage.artifact import runs_folder, write_parquet
from tasks.workloads.workload import load_workload
from tests.full_disk import files_of_at_most
from tests.sources import make_job

SCHEMA = pa.schema([("row_id", pa.int64())])
BATCH = pa.record_batch([pa.array([1, 2], pa.int64())], schema=SCHEMA)


def record(run_id: str) -> RunRecord:
    return RunRecord(
        run_id=run_id,
        workload="snippets",
        workload_source="snippets",
        workload_digest="w",
        model="m",
        model_digest="d",
        started_at="2026-11-21T02:00:00+00:00",
        config={"max_num_batched_tokens": 1024, "nested": {"a": [1]}},
        versions={"duckdb": "2.0.0"},
    )


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "night.duckdb"


def contents(run: Run) -> Any:
    return run.record, run.artifacts, run.is_written


def folders(database: Path) -> list[Path]:
    """Of the unfinished runs."""
    return [run.folder for run in sweep_runs(database)]


def mode(path: str | Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_everything_is_private_even_in_a_folder_that_was_not(database: Path) -> None:
    runs_folder(database).mkdir(mode=0o755)
    folder = Path(Run.create(database, record("r1")).folder)
    assert folder == database.with_name("night.duckdb.runs") / "r1"
    assert {mode(path) for path in (folder.parent, folder, folder / "parts", folder / "steps")} == {0o700}
    assert mode(folder / "manifest.json") == 0o600


def test_a_manifest_survives(database: Path) -> None:
    run = Run.create(database, record("r1"))
    folder = Path(run.folder)
    assert contents(Run.load(database, folder)) == contents(run) == (record("r1"), {}, False)
    ref = write_parquet(folder / "requests.parquet", SCHEMA, [BATCH])
    run.note({"requests": ref}, status="interrupted", seconds={"read": 0.5})
    updated = (replace(record("r1"), status="interrupted", seconds={"read": 0.5}), {"requests": ref}, False)
    assert contents(Run.load(database, folder)) == contents(run) == updated


@pytest.mark.parametrize("run_id", ["", ".", "..", "a/b", "../up", ".hidden", "a b", "a\0b", "é"])
def test_a_run_id_cannot_leave_its_folder(database: Path, run_id: str) -> None:
    with pytest.raises(ArtifactError, match="a run id holds letters"):
        Run.create(database, record(run_id))
    assert list(database.parent.rglob("*")) == []


def test_a_run_id_is_given_once(database: Path) -> None:
    ids = {new_run_id("snippets") for _ in range(100)}
    assert len(ids) == 100
    run_id = ids.pop()
    Run.create(database, record(run_id))
    with pytest.raises(ArtifactError, match="cannot be written: File exists"):
        Run.create(database, record(run_id))


def test_unfinished_runs_are_found_until_they_are_written(database: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert folders(database) == []
    second, first = (Run.create(database, record(run_id)) for run_id in ("r2", "r1"))
    (runs_folder(database) / "r0").mkdir()
    assert folders(database) == [first.folder, second.folder]
    first.end("completed")
    first.finish()
    finished = Run.load(database, Path(first.folder))
    assert finished.is_written
    assert finished.record.status == "completed"
    assert folders(database) == [second.folder]
    (Path(first.folder) / "manifest.json").write_text("{")  # of a run that is written
    assert folders(database) == [second.folder]
    assert not caplog.messages
    (Path(second.folder) / "manifest.json").write_text("{")
    assert folders(database) == []
    (line,) = caplog.messages
    assert f"r2 cannot be written, its answers stay in {second.folder}: {second.folder}/manifest.json is not" in line


def test_a_written_run_keeps_its_steps_alone(database: Path) -> None:
    run = Run.create(database, record("r1"))
    for name in ("requests", "tokens", "plan", "parts/part-00000", "steps/part-00000"):
        write_parquet(Path(run.folder) / f"{name}.parquet", SCHEMA, [BATCH])
    for torn in (".plan.parquet.7-ab.tmp", "steps/.part-00001.parquet.7-ab.tmp"):
        (Path(run.folder) / torn).write_bytes(b"PAR1")
    run.finish()
    files = {str(path.relative_to(run.folder)) for path in Path(run.folder).rglob("*") if path.is_file()}
    assert files == {"manifest.json", "steps/part-00000.parquet"}


def test_what_a_killed_process_could_not_delete_is_swept(database: Path) -> None:
    unborn, written, working = (new_run_id("snippets") for _ in range(3))
    (runs_folder(database) / unborn / "parts").mkdir(parents=True)
    for run_id in (written, working):
        folder = Path(Run.create(database, record(run_id)).folder)
        for name in ("requests", "parts/part-00000"):
            write_parquet(folder / f"{name}.parquet", SCHEMA, [BATCH])
    manifest = runs_folder(database) / written / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"is_written": false', '"is_written": true'))
    (runs_folder(database) / "somebody's").mkdir()
    sweep_runs(database)
    root = runs_folder(database)
    files = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    kept = {f"{working}/{name}" for name in ("manifest.json", "requests.parquet", "parts/part-00000.parquet")}
    assert files == kept | {f"{written}/manifest.json"}
    assert {path.name for path in root.iterdir()} == {written, working, "somebody's"}
    (root / written / ".report.html.4711-0a1b2c3d.tmp").write_bytes(b"half a page")
    (root / written / "report.html").write_bytes(b"a page")
    sweep_runs(database)
    assert {path.name for path in (root / written).iterdir() if path.is_file()} == {"manifest.json", "report.html"}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"record": {}, "artifacts": {}, "is_written": false}',
        '{"record": {"surprise": 1}, "artifacts": {}, "is_written": false}',
    ],
)
def test_a_damaged_manifest_is_refused(database: Path, content: str) -> None:
    folder = Run.create(database, record("r1")).folder
    (Path(folder) / "manifest.json").write_text(content)
    with pytest.raises(ArtifactError, match="is not a run's manifest"):
        Run.load(database, Path(folder))


def test_the_notes_of_its_engines_are_in_the_config_of_a_run_whose_process_ended(database: Path) -> None:
    run = Run.create(database, record("20261121T020000-snippets-ab12cd"))
    engines = [{"memory_fraction": 0.4, "max_num_batched_tokens": size} for size in (512, 1024)]
    (Path(run.folder) / "engines").mkdir()
    for engine in engines:
        (Path(run.folder) / "engines" / f"{engine['max_num_batched_tokens']}.json").write_text(json.dumps(engine))
    (found,) = sweep_runs(database)
    found.end("interrupted", "its process ended")
    assert found.record.config["engines_with_less_memory"] == engines[::-1], "most tokens first"
    assert Run.load(database, Path(run.folder)).record.status == "interrupted"


def test_an_unknown_status_is_refused(database: Path) -> None:
    folder = Run.create(database, record("r1")).folder
    path = Path(folder) / "manifest.json"
    value = json.loads(path.read_text())
    value["record"]["status"] = "lost"
    path.write_text(json.dumps(value))
    with pytest.raises(ArtifactError, match="unknown status 'lost'"):
        Run.load(database, Path(folder))


def test_parts_that_are_whole(database: Path) -> None:
    run = Run.create(database, record("r1"))
    folder = Path(run.folder)
    refs = [write_parquet(folder / "parts" / f"part-{number:05}.parquet", SCHEMA, [BATCH]) for number in (2, 0, 1)]
    Path(refs[2].path).write_bytes(Path(refs[2].path).read_bytes()[:-4])
    (folder / "parts" / ".part-00003.parquet.77-ab.tmp").write_bytes(b"PAR1")
    assert run.list_parts() == [refs[1], refs[0]]
    assert run.list_steps() == []


HOLD = """
import sys
from tasks.runs.run import hold_database
with hold_database(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_run_at_a_time_and_a_killed_one_lets_go(database: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    (other := database.with_name("other.duckdb")).touch()
    database.touch()
    with subprocess.Popen([sys.executable, "-c", HOLD, str(database)], **pipes) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        message = rf"another run works on .*\(process id {child.pid}\)"
        with pytest.raises(DatabaseError, match=message), hold_database(database):
            pytest.fail("held twice")
        with hold_database(other):
            pass
        child.kill()
        child.wait(timeout=30)
        with hold_database(database):
            assert (runs_folder(database) / "lock").read_text() == f"{os.getpid()}\n"


def test_a_full_disk_is_named_where_the_lock_cannot_be_written(database: Path) -> None:
    message = r"lock cannot be written: File too large; [\d,]+ bytes free in "
    database.touch()
    with files_of_at_most(0), pytest.raises(ArtifactError, match=message), hold_database(database):
        pytest.fail("held without a lock")


def test_a_file_system_without_locks_is_named(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    database.touch()
    monkeypatch.setattr(fcntl, "flock", refuse)
    message = r"\.runs/lock cannot be locked: Operation not supported; runs need a file system that can"
    with pytest.raises(ArtifactError, match=message), hold_database(database):
        pytest.fail("held without a lock")


def test_two_workloads_of_one_name_are_named_once(tmp_path: Path) -> None:
    """As `compare` answers an old and a new one."""
    job = make_job(tmp_path, load_workload("snippets"), tmp_path)
    assert replace(job, members=job.members * 2).title == "snippets"
