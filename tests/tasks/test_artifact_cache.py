"""What no run has used for a week or still needs goes, and what killed processes left, and nothing else."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pytest

from tasks.recover import prune_cache
from tasks.runs.run import Run
from tasks.storage.artifact import ArtifactRef, build_once, list_whole, open_parquet, runs_folder, write_parquet
from tasks.workloads.workload import load_workload
from tests.sources import make_source


def age(path: str | Path) -> None:
    os.utime(path, (time.time() - 8 * 86400,) * 2)


def test_old_files_go_and_others_stay(tmp_path: Path) -> None:
    database = tmp_path / "night.duckdb"
    folder = runs_folder(database) / "cache"
    folder.mkdir(parents=True)
    names = (
        "plan-1.parquet",
        ".plan-1.parquet.7-ab.tmp",
        "duckdb_temp_7_0_owner",
        "duckdb_temp_7_0_storage_S64K-0.tmp",
    )
    for name in names:
        (folder / name).write_bytes(b"new")
    prune_cache(database)
    assert {path.name for path in folder.iterdir()} == set(names)
    for name in (*names, "somebody's"):
        (folder / name).write_bytes(b"old")
        age(folder / name)
    (folder / "tokens-1.parquet").write_bytes(b"new")
    prune_cache(database)
    assert {path.name for path in folder.iterdir()} == {"somebody's", "tokens-1.parquet"}


def test_a_run_that_waits_to_be_written_keeps_its_tokens_and_plan(tmp_path: Path) -> None:
    database = tmp_path / "night.duckdb"
    rows = pa.record_batch({"row_id": [1, 2]})
    run = Run.begin(make_source(database), load_workload("snippets"), {})
    for name in ("tokens", "plan"):
        ref = build_once(database, name, ["content"], lambda path: write_parquet(path, rows.schema, [rows]))
        run.note({name: ref})
        age(ref.path)
    manifest = run.folder / "manifest.json"
    for content in (manifest.read_text(), "{"):  # the latter stands for one of a later version
        manifest.write_text(content)
        prune_cache(database)
        assert all(Path(ref.path).exists() for ref in run.artifacts.values())
    run.finish()
    prune_cache(database)
    assert not any((runs_folder(database) / "cache").iterdir())


def test_a_file_that_another_process_deletes_meanwhile_is_passed_over(tmp_path: Path) -> None:
    """A link to nothing stands for a file that is listed and then gone."""
    folder = runs_folder(tmp_path / "night.duckdb") / "cache"
    folder.mkdir(parents=True)
    (folder / "plan-1.parquet").symlink_to(folder / "gone")
    (folder / "tokens-1.parquet").write_bytes(b"old")
    age(folder / "tokens-1.parquet")
    prune_cache(tmp_path / "night.duckdb")
    assert not (folder / "tokens-1.parquet").exists()


def test_a_file_that_is_deleted_while_it_is_found_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pa.record_batch({"row_id": [1, 2]})
    content = (tmp_path / "night.duckdb", "plan", ["content"], lambda path: write_parquet(path, rows.schema, [rows]))
    first = build_once(*content)

    def list_and_delete(paths: Iterable[Path]) -> list[ArtifactRef]:
        refs = list_whole(paths)
        Path(first.path).unlink()
        return refs

    monkeypatch.setattr("tasks.storage.artifact.list_whole", list_and_delete)
    assert build_once(*content) == first
    open_parquet(first).close()
