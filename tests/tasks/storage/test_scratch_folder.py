"""Folders for temporary files: gone with their block, and with a killed process at the next start."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from engine.errors import ArtifactError
from tasks.storage.scratch_folder import scratch_folder

HOLD = (
    "import time; from tasks.storage.scratch_folder import scratch_folder\n"
    "with scratch_folder('sample') as folder:\n"
    "    (folder / 'texts').write_text('of rows'); print(folder, flush=True); time.sleep(60)"
)


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_file_system_without_locks_is_named_and_left_clean(
    temporary_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    message = "cannot hold a lock: Operation not supported; name another folder in TMPDIR"
    with pytest.raises(ArtifactError, match=message), scratch_folder("explain"):
        pytest.fail("held without a lock")
    assert not list(temporary_folder.iterdir())


def test_a_folder_is_private_and_goes_with_its_block(temporary_folder: Path) -> None:
    with scratch_folder("explain") as folder:
        assert folder.parent == temporary_folder
        assert folder.name.startswith("batchloom-explain-")
        assert folder.stat().st_mode & 0o077 == 0
    assert not list(temporary_folder.iterdir())
    (place := temporary_folder / "of a database").mkdir()
    with scratch_folder("explain", place) as folder:
        assert folder.parent == place
    assert not list(place.iterdir())


def test_the_next_one_deletes_what_killed_processes_left_and_nothing_else(temporary_folder: Path) -> None:
    of_user = temporary_folder / "batchloom-mails.duckdb.runs" / "lock"
    of_user.parent.mkdir()
    of_user.touch()
    places = []
    for kills in (True, False):
        with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            places.append(Path(process.stdout.readline().strip()))
            if kills:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                assert (places[0] / "texts").exists()
                continue
            with scratch_folder("compare"):
                assert [place.exists() for place in places] == [False, True], "the second process is alive"
            process.kill()
    with scratch_folder("advise"):
        assert not places[1].exists()
    assert list(temporary_folder.iterdir()) == [of_user.parent]
    assert of_user.exists()


def test_a_folder_that_duckdb_reads_as_a_pattern_is_refused(
    temporary_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (temporary_folder / "a*b").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary_folder / "a*b"))
    line = r"a\*b: DuckDB reads \* in a path as a pattern: rename the file or folder, or name another one in TMPDIR"
    with pytest.raises(ArtifactError, match=line), scratch_folder("sample"):
        pass
    assert not list((temporary_folder / "a*b").iterdir())
