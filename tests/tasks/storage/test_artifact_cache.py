"""What no run has used for a week goes, and what killed processes left, and nothing else."""

import os
import time
from pathlib import Path

from tasks.storage.artifact import prune_cache, runs_folder


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
        os.utime(folder / name, (time.time() - 8 * 86400,) * 2)
    (folder / "tokens-1.parquet").write_bytes(b"new")
    prune_cache(database)
    assert {path.name for path in folder.iterdir()} == {"somebody's", "tokens-1.parquet"}
