"""The copy for readers is complete at every moment, even while it is read, renewed, or its writer is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import pytest

from engine.errors import BatchloomError, ConfigError, DatabaseError
from tasks.publish import check_target, publish
from tests.flows.distributed.worker_watch import lose_step_records, meanwhile

ROOT = Path(__file__).parents[2]
READ = """
import sys, time, duckdb
seen, number_of_reads = set(), 0
print("reading", flush=True)
while 2 not in seen or number_of_reads < 20:
    with duckdb.connect(sys.argv[1], read_only=True) as connection:
        seen.add(connection.execute("select count(*) from runs").fetchone()[0])
        ok, errors = connection.execute("select sum(num_ok), sum(num_errors) from runs").fetchone()
        rows = connection.execute("select (select count(*) from snippets) + (select count(*) from rankings)").fetchone()
        assert rows[0] == (ok or 0) + (errors or 0), (rows, ok, errors)
        number_of_reads += 1
print(sorted(seen), flush=True)
"""
PUBLISH = "import sys; from tasks.publish import publish; publish.fn(sys.argv[1], sys.argv[2])"


def temporaries(folder: Path) -> list[Path]:
    return list(folder.glob(".*.tmp"))


@pytest.mark.usefixtures("prefect_server")
def test_readers_see_whole_nights(nights: Any, tmp_path: Path) -> None:
    """One process reads the copy in a loop while a night of two workloads runs and renews it."""
    copy = tmp_path / "published" / "team.duckdb"
    copy.parent.mkdir()
    publish.fn(nights.path, copy)
    with duckdb.connect(str(copy), read_only=True) as yesterday:
        with subprocess.Popen([sys.executable, "-c", READ, str(copy)], stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "reading\n"
            nights.run(publish=copy)
            assert reader.stdout.readline() == "[0, 2]\n"
        assert reader.returncode == 0
        assert yesterday.execute("select count(*) from snippets").fetchall() == [(0,)]
    assert copy.stat().st_mode & 0o777 == nights.path.stat().st_mode & 0o444
    assert temporaries(copy.parent) == []


@pytest.mark.usefixtures("prefect_server")
def test_a_failed_night_publishes_what_it_finished(nights: Any, tmp_path: Path) -> None:
    copy = tmp_path / "copy.duckdb"
    with meanwhile(lambda: lose_step_records(nights.runs)), pytest.raises(BatchloomError, match="steps"):
        nights.run("snippets", partition_tokens=1, publish=copy)
    with duckdb.connect(str(copy), read_only=True) as connection:
        ((status, num_ok),) = connection.execute("select status, num_ok from runs").fetchall()
        assert status == "failed"
        assert connection.execute("select count(*) from snippets").fetchall() == [(num_ok,)]


def test_a_copy_in_the_making_keeps_writers_out_and_readers_in(nights: Any, tmp_path: Path) -> None:
    """The copying process is halted in the middle, then killed."""
    copy = tmp_path / "copy.duckdb"
    publish.fn(nights.path, copy)
    nights.sql("create table ballast as select repeat(md5(i::varchar), 10) as text from range(250_000) as t (i)")
    command = [sys.executable, "-c", PUBLISH, str(nights.path), str(copy)]
    with subprocess.Popen(command, cwd=ROOT) as publisher:
        while not temporaries(tmp_path):
            assert publisher.poll() is None
        publisher.send_signal(signal.SIGSTOP)
        assert temporaries(tmp_path)
        with pytest.raises(duckdb.IOException, match=rf"Could not set lock .* \(PID {publisher.pid}\)"):
            duckdb.connect(str(nights.path))
        for path, num_tables in ((nights.path, 1), (copy, 0)):
            with duckdb.connect(str(path), read_only=True) as connection:
                found = connection.execute("select count(*) from duckdb_tables() where table_name = 'ballast'")
                assert found.fetchall() == [(num_tables,)]
        publisher.kill()
    with duckdb.connect(str(copy), read_only=True) as connection:
        assert connection.execute("select count(*) from documents").fetchall() == [(4,)]
    assert temporaries(tmp_path)
    num_bytes = publish.fn(nights.path, copy)
    assert temporaries(tmp_path) == []
    assert num_bytes == copy.stat().st_size == nights.path.stat().st_size
    with duckdb.connect(str(copy), read_only=True) as connection:
        assert connection.execute("select count(*) from ballast").fetchall() == [(250_000,)]


def test_a_folder_that_cannot_be_written_is_found_before_the_night(nights: Any, tmp_path: Path) -> None:
    folder = tmp_path / "readers"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("this user may not mount")
    try:
        with pytest.raises(ConfigError, match=r"publish: .*/readers cannot be written: the folder, or its file system"):
            check_target(nights.path, folder / "copy.duckdb", {})
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.usefixtures("prefect_server")
def test_a_copy_does_not_replace_what_is_attached(nights: Any, tmp_path: Path) -> None:
    crm = tmp_path / "crm.duckdb"
    duckdb.connect(str(crm)).close()
    with pytest.raises(ConfigError, match=r"publish: .*/crm.duckdb is attached as 'crm' and would be replaced"):
        nights.run(attach=(f"crm={crm}",), publish=crm)
    with pytest.raises(ConfigError, match=r"attach: each name may be given once, got crm=.*, crm="):
        nights.run(attach=(f"crm={crm}", f"crm={tmp_path}"))


def test_a_copy_is_not_made_where_it_would_harm(nights: Any, tmp_path: Path) -> None:
    link = tmp_path / "link.duckdb"
    os.link(nights.path, link)
    for target, message in (
        (tmp_path / "none" / "copy.duckdb", "no folder"),
        (tmp_path, "is a folder"),
        (Path("a\0b"), r"publish: no file's name holds a NUL, got 'a\\x00b'"),
        (nights.path, "is the database itself"),
        (link, "is the database itself"),
        (Path(__file__), "is not a DuckDB database and would be replaced"),
        (Path("/proc/copy.duckdb"), "publish: /proc/copy.duckdb cannot be written: No such file or directory"),
        (tmp_path / ("c" * 250), "c cannot be written: File name too long"),  # its temporary file has a longer name
    ):
        with pytest.raises(ConfigError, match=message):
            check_target(nights.path, target, {})
    check_target(nights.path, tmp_path / "copy.duckdb", {})
    assert sorted(tmp_path.iterdir()) == [link, nights.path]
    copy = tmp_path / "copy.duckdb"
    (tmp_path / "copy.duckdb.wal").write_bytes(b"x")
    with pytest.raises(DatabaseError, match=r"copy\.duckdb\.wal exists: somebody writes to the published copy"):
        publish.fn(nights.path, copy)
    (tmp_path / "copy.duckdb.wal").unlink()
    hold = (
        f"import duckdb, sys; held = duckdb.connect({str(nights.path)!r}); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(DatabaseError, match=f"is locked by process {holder.pid}"):
            publish.fn(nights.path, copy, lock_timeout_seconds=0.3)
        assert not copy.exists()
