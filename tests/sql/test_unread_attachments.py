"""What a night attaches is opened only for queries that read it; one that another process writes to is waited for."""

import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import pytest

from engine.errors import DatabaseError
from tasks.nights.check_steps import check_in_turn
from tasks.workloads.workload import Workload, load_workload
from tests.sql.notes import WORKLOAD, held_open

OF_OTHER = "select note_id, text from "


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., None]:
    """Checks a query over a database with a table of notes, and views and a macro that read attachments."""
    with duckdb.connect(str(tmp_path / "team.duckdb")) as connection:
        connection.execute("attach ':memory:' as other")
        connection.execute("create table other.people as select '1' as note_id, 'Ann' as text")
        connection.execute("create view first as from other.people")
        connection.execute("create macro persons() as table from first")
        connection.execute("create view second as from persons()")
        connection.execute("create table notes as select '1' as note_id, 'bread' as text")

    def check(query: str, attach: dict[str, str], lock_timeout_seconds: float = 0.2) -> None:
        (tmp_path / "select.sql").write_text(query)
        (tmp_path / "notes.toml").write_text(WORKLOAD)
        workload: Workload = load_workload(tmp_path / "notes.toml")
        check_in_turn(tmp_path / "team.duckdb", [workload], attach, lock_timeout_seconds)

    return check


@pytest.fixture
def other(tmp_path: Path) -> Path:
    with duckdb.connect(str(tmp_path / "crm.duckdb")) as connection:
        connection.execute("create table people as select '1' as note_id, 'Ann' as text")
    return tmp_path / "crm.duckdb"


@pytest.fixture
def holder(other: Path) -> Iterator[subprocess.Popen[str]]:
    with held_open(other) as child:
        yield child


def test_a_locked_file_keeps_only_those_waiting_that_read_it(
    check: Callable[..., None], other: Path, holder: subprocess.Popen[str]
) -> None:
    check(f"{OF_OTHER} notes", {"other": str(other)})
    for table in ("other.people", "first", "second", "Persons()", '"Other"."people"'):
        with pytest.raises(DatabaseError) as caught:
            check(OF_OTHER + table, {"other": str(other)})
        assert str(caught.value).startswith(f"attach: other: {other}: is locked by process {holder.pid} (")
        assert str(caught.value).endswith("; waited 0.2 s")
    timer = threading.Timer(0.5, lambda: holder.stdin and holder.stdin.close())
    timer.start()
    check(f"{OF_OTHER} second", {"other": str(other)}, 20)
    timer.join()
    holder.wait(timeout=20)
    holder.stdin = None


@pytest.mark.parametrize("name", ["orders.parquet", "orders.json", "orders.xlsx", "orders.avro"])
def test_a_broken_file_of_a_folder_is_an_error_of_queries_that_read_it(
    check: Callable[..., None], tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "exports"
    folder.mkdir()
    (folder / name).write_text('PAR1 {"half')
    (folder / "people.csv").write_text("note_id,text\n1,Ann\n")
    attach = {"exports": str(folder)}
    check(f"{OF_OTHER} exports.people", attach)
    check(f"{OF_OTHER} 'exports/people.csv'".replace("exports/", f"{folder}/"), attach)
    if name in ("orders.parquet", "orders.json"):
        with pytest.raises(DatabaseError, match=rf"attach: exports: {folder}: .*orders\."):
            check(f"{OF_OTHER} exports.orders", attach)
