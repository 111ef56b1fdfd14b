"""Opening a database waits for locks and gives one-line errors; identifiers are quoted safely."""

import re
import signal
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect.exceptions import TerminationSignal
from prefect.utilities.engine import capture_sigterm

from engine.errors import DatabaseError
from tasks.database.connection import connect, fill_identifiers, quote_identifier, transaction
from tasks.database.opening import open_in_memory
from tests.sql.notes import held_open


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "a.duckdb"
    with connect(path, create=True) as connection:
        connection.execute("create table numbers as select 1 as n")
    return path


@pytest.fixture
def holder(database: Path) -> Iterator[subprocess.Popen[str]]:
    with held_open(database) as child:
        yield child


@pytest.mark.parametrize("read_only", [True, False])
def test_a_lock_names_the_process_that_holds_it(database: Path, holder: subprocess.Popen[str], read_only: bool) -> None:
    with pytest.raises(DatabaseError) as caught, connect(database, read_only=read_only, lock_timeout_seconds=0.2):
        pytest.fail("opened a locked file")
    assert str(caught.value).startswith(f"{database} is locked by process {holder.pid} (")
    assert str(caught.value).endswith("; waited 0.2 s")


def test_a_lock_that_is_let_go_in_time_is_no_error(database: Path, holder: subprocess.Popen[str]) -> None:
    timer = threading.Timer(0.5, lambda: holder.stdin and holder.stdin.close())
    timer.start()
    with connect(database, lock_timeout_seconds=20) as connection:
        assert connection.execute("select n from numbers").fetchall() == [(1,)]
    timer.join()
    holder.wait(timeout=20)
    holder.stdin = None


def test_a_long_wait_is_logged_with_who_is_waited_for(
    database: Path, holder: subprocess.Popen[str], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        pytest.raises(DatabaseError, match=r"; waited 2.5 s"),
        caplog.at_level("WARNING", "batchloom"),
        connect(database, read_only=True, lock_timeout_seconds=2.5),
    ):
        pytest.fail("opened a locked file")
    (line,) = caplog.messages
    assert line.startswith(f"{database} is locked by process {holder.pid} (")
    assert line.endswith("); waiting up to 2.5 s")


def test_this_process_may_have_it_open_already(database: Path) -> None:
    with connect(database) as writing, connect(database, read_only=True) as reading:
        writing.execute("insert into numbers values (2)")
        assert reading.execute("select count(*) from numbers").fetchall() == [(2,)]
    with (
        connect(database, read_only=True),
        pytest.raises(DatabaseError, match="another user of this process"),
        connect(database, lock_timeout_seconds=0.1),
    ):
        pytest.fail("opened for writing what is open for reading")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no database at .*: no such file"),
        (lambda path: path.mkdir(), "no database at .*: not a file"),
        (lambda path: path.write_text("a,b\n1,2\n" * 2000), "cannot be opened: .*not a valid DuckDB database file"),
    ],
)
def test_what_is_no_database(tmp_path: Path, make: object, message: str) -> None:
    path = tmp_path / "no.duckdb"
    make(path)  # type: ignore[operator]
    with pytest.raises(DatabaseError, match=message) as caught, connect(path):
        pytest.fail("opened")
    assert "\n" not in str(caught.value)
    assert path.exists() == ("no such file" not in str(caught.value)), "nothing was made"


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("name", ["documents.csv", "documents.json", "documents.parquet", "documents.sqlite"])
def test_a_data_file_is_no_database(tmp_path: Path, name: str, read_only: bool) -> None:
    path = tmp_path / name
    if path.suffix == ".sqlite":
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("create table documents (doc_id text)")
            connection.commit()
    else:
        duckdb.execute(f"copy (select 'd1' as doc_id, 'a text' as body) to '{path}'")
    message = "cannot be opened: not a valid DuckDB database file; name a DuckDB file, and others with --attach"
    with pytest.raises(DatabaseError, match=message), connect(path, read_only=read_only):
        pytest.fail("opened")


@pytest.mark.parametrize("name", ["a?b", "a*b", "a[b]", "a\\b"])
def test_a_path_that_duckdb_reads_as_a_pattern_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / "plain").symlink_to(tmp_path / name)
    message = f"DuckDB reads {re.escape(name[1])} in a path as a pattern: rename the file or folder"
    for path in (tmp_path / name / "x.duckdb", tmp_path / f"{name}.duckdb", tmp_path / "plain" / "x.duckdb"):
        with pytest.raises(DatabaseError, match=message), connect(path, create=True):
            pytest.fail("opened")


@pytest.mark.parametrize("name", ["a'b", 'a"b', " a b", "a\nb", "-a", "a%b#;", "{a,b}", "<a>", "é"])
def test_other_paths_are_usual_ones(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    path = tmp_path / name / f"{name}.duckdb"
    with connect(path, create=True) as connection:
        connection.execute("create table t as select 1 as a")
    with connect(path, read_only=True) as connection:
        assert connection.execute("from t").fetchall() == [(1,)]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="No such file or directory"), connect(tmp_path / "a" / "b", create=True):
        pytest.fail("opened")


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("from absent", "no table or view 'absent'"),
        ("with absent as (from absent) from absent", "no table or view 'absent'"),
        ("select numbers.m from numbers", "table 'numbers' has no column 'm'"),
        ("select m from numbers", """no column 'm'; there are "n\""""),
        ("select 'x'::integer", "Conversion Error: Could not convert string 'x' to INT32"),
    ],
)
def test_an_error_inside_is_told_in_one_line(database: Path, query: str, message: str) -> None:
    with pytest.raises(DatabaseError) as caught, connect(database, read_only=True) as connection:
        connection.execute(query).fetchall()
    assert str(caught.value) == f"{database}: {message}"


def test_reading_only_cannot_write(database: Path) -> None:
    with pytest.raises(DatabaseError, match="read-only"), connect(database, read_only=True) as connection:
        connection.execute("insert into numbers values (3)")


def test_a_commit_that_fails_says_why(database: Path) -> None:
    log = Path(f"{database}.wal")

    def write() -> None:
        with connect(database) as connection, transaction(connection):
            connection.execute("create table other (x integer)")
            log.mkdir()  # DuckDB opens its log at the first commit

    with pytest.raises(DatabaseError, match=r"Failed to commit: .*\.wal"):
        write()
    log.rmdir()
    with connect(database) as connection:
        assert connection.sql("select 1 from duckdb_tables() where table_name = 'other'").fetchall() == []


def test_timestamps_and_memory(database: Path) -> None:
    with connect(database, memory_limit="100MB") as connection:
        settings = "select current_setting('TimeZone'), current_setting('memory_limit')"
        assert connection.execute(settings).fetchall() == [("UTC", "95.3 MiB")]


@pytest.fixture(scope="module")
def memory() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect(":memory:") as connection:
        yield connection


@given(name=st.text(min_size=1).filter(lambda name: name.isprintable() and name.lower() not in ("keep", "z")))
def test_any_name_is_one_identifier(memory: duckdb.DuckDBPyConnection, name: str) -> None:
    with memory.cursor() as connection:
        connection.begin()
        connection.execute("create table keep (a int)")
        connection.execute(fill_identifiers("create table {table} ({columns text}, z int)", table=name, columns=[name]))
        found = connection.execute("select table_name from information_schema.tables order by all").fetchall()
        columns = connection.execute(fill_identifiers("select * from {table}", table=name)).description
        connection.rollback()
    assert sorted(found) == sorted([("keep",), (name,)])
    assert columns is not None
    assert [column[0] for column in columns] == [name, "z"]


@pytest.mark.parametrize("name", ["", "a\0b"])
def test_what_can_be_no_identifier(name: str) -> None:
    with pytest.raises(DatabaseError, match="not a name"):
        quote_identifier(name)


def test_placeholders_are_filled_once_and_headers_left_out() -> None:
    text = "-- header {a}\nselect {a}, [{b}] from {c text}"
    assert fill_identifiers(text, a="{b}", b=["x", 'y"'], c="t") == 'select "{b}", ["x", "y"""] from "t" text'
    assert fill_identifiers("select {a} <b>", {"b": "as {a}"}, a="<b>") == 'select "<b>" as {a}'
    with pytest.raises(KeyError, match="missing"):
        fill_identifiers("select {missing}")


def test_every_statement_has_a_header_and_is_lower_case() -> None:
    folder = Path(__file__).parents[2] / "sql"
    files = sorted(folder.rglob("*.sql"))
    assert len(files) > 10
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert re.match(r"-- purpose: .+\n(?:-- .+\n)*-- grain: .+\n(?:-- .+\n)*-- inputs: .+\n", text), file.name
        assert re.search(r"^-- parameters: ", text, re.MULTILINE), file.name
        code = re.sub(r"--.*|'[^']*'|\\\\.", "", text)
        keywords = re.findall(r"\b(?:SELECT|FROM|WHERE|WITH|AS|JOIN|AND|OR|INSERT|INTO|CREATE)\b", code)
        assert not keywords, f"{file.name}: {keywords[0]}"
        if file.name != "schema.sql":
            assert ";" not in code, f"{file.name} holds more than one statement"


@pytest.fixture
def usual_ctrl_c() -> Iterator[None]:
    """Ctrl-C raises `KeyboardInterrupt`; a command that has run in this process leaves another handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("usual_ctrl_c")
@pytest.mark.parametrize("open_database", [connect, open_in_memory])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_a_query_is_ctrl_c(database: Path, open_database: Any, number: signal.Signals) -> None:
    """DuckDB reports what a signal's handler raises as an error of its own: of the function, or of no known type. A
    flow run of Prefect has its own handler of SIGTERM."""

    def interrupt(values: pa.ChunkedArray) -> pa.Array:
        signal.raise_signal(number)
        return values

    def query(sql: str) -> None:
        with open_database(database) as connection:
            connection.execute("set threads = 1")  # else another thread computes, and DuckDB sees no signal
            connection.create_function("interrupt", interrupt, ["integer"], "integer", type="arrow").execute(sql)

    stopped = (KeyboardInterrupt, TerminationSignal)  # the latter if no query is under way
    with capture_sigterm():
        with pytest.raises(stopped):
            query("select interrupt(1)")
        threading.Timer(0.3, signal.raise_signal, [number]).start()
        with pytest.raises(stopped):
            query("select sum(hash(i)::hugeint) from range(2_000_000_000) as t (i)")
