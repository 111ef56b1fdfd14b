"""SQL of a workload reads its database, and of other files and the network only what the night attaches."""

import sqlite3
from pathlib import Path
from typing import Any

import duckdb
import pytest

from engine.errors import ConfigError, DatabaseError
from tasks.database.attach import parse_attachments
from tasks.database.connection import connect, restrict_sql
from tasks.read import read
from tasks.workloads.workload import Workload, load_workload
from tests.sources import make_source
from tests.sql.notes import WORKLOAD


def make_folder(night: Any) -> Path:
    """Of a run; SQL may read it."""
    folder = Path(f"{night.path}.runs") / "run"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def make_workload(tmp_path: Path) -> Any:
    def make(sql: str) -> Workload:
        (tmp_path / "select.sql").write_text(sql)
        (tmp_path / "notes.toml").write_text(WORKLOAD)
        return load_workload(tmp_path / "notes.toml")

    return make


@pytest.fixture
def exports(tmp_path: Path) -> Path:
    """A folder of tables, each with a row, and a folder beside it that nobody attaches."""
    for name in ("exports", "private"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.csv").write_text(f"note_id,text\n1,{name}\n")
    with duckdb.connect() as connection:
        connection.execute(f"copy (select '2' as note_id, 'bread' as text) to '{tmp_path}/exports/o''clock.parquet'")
    (tmp_path / "exports" / "link.csv").symlink_to(tmp_path / "private" / "notes.csv")
    return tmp_path / "exports"


@pytest.mark.parametrize(
    "query",
    [
        "select '1' as note_id, content as text from read_text('/etc/hostname')",
        "select '1' as note_id, content as text from read_blob('{private}')",
        "select note_id, text from '{private}'",
        "select note_id, text from read_csv('{exports}/../private/notes.csv')",
        "select file as note_id, file as text from glob('/etc/*')",
    ],
)
@pytest.mark.parametrize("is_attached", [False, True])
def test_no_file_is_read_that_is_not_attached(
    night: Any, make_workload: Any, exports: Path, query: str, is_attached: bool
) -> None:
    private = exports.parent / "private" / "notes.csv"
    workload = make_workload(query.format(private=private, exports=exports))
    attach = {"exports": str(exports)} if is_attached else {}
    message = r"in the query of workload 'notes': no right to read .*to allow it, add "
    with pytest.raises(DatabaseError, match=message) as caught:
        read.fn(make_source(night.path, attach=attach), workload, make_folder(night))
    assert "add [attach] and " in str(caught.value)
    assert "--attach " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_lines_of_the_message_allow_it(night: Any, make_workload: Any, exports: Path) -> None:
    workload = make_workload(f"select note_id, text from read_csv('{exports}/notes.csv')")
    with pytest.raises(DatabaseError) as caught:
        read.fn(make_source(night.path), workload, make_folder(night))
    name, _, folder = str(caught.value).rpartition("--attach ")[2].partition(")")[0].partition("=")
    found = read.fn(
        make_source(night.path, attach=parse_attachments({name: folder}, Path("/nowhere"))),
        workload,
        make_folder(night),
    )
    assert found.num_selected == 1


@pytest.mark.parametrize("url", ["https://example.org/notes.csv", "s3://bucket/notes.parquet"])
def test_the_network_is_not_reached(night: Any, make_workload: Any, url: str) -> None:
    workload = make_workload(f"select note_id, text from '{url}'")
    with pytest.raises(DatabaseError, match=r"no right to read .*reaches no network"):
        read.fn(make_source(night.path), workload, make_folder(night))


def test_variables_of_the_process_are_not_tables(night: Any, make_workload: Any) -> None:
    import pyarrow as pa

    secrets = pa.table({"note_id": ["1"], "text": ["secret"]})
    assert secrets.num_rows == 1
    with pytest.raises(DatabaseError, match="no table or view 'secrets'"):
        read.fn(make_source(night.path), make_workload("select note_id, text from secrets"), make_folder(night))


def test_a_table_of_a_folder_that_is_not_attached(night: Any, make_workload: Any) -> None:
    with pytest.raises(DatabaseError, match=r"no table or view 'exports\.notes'; is an --attach exports=PATH missing"):
        read.fn(make_source(night.path), make_workload("select note_id, text from exports.notes"), make_folder(night))


def test_attached_files_are_tables(night: Any, make_workload: Any, exports: Path) -> None:
    other = exports.parent / "crm.duckdb"
    with duckdb.connect(str(other)) as connection:
        connection.execute("create table people as select '3' as note_id, 'Ann' as text")
    workload = make_workload(
        'select note_id::text as note_id, text from exports.notes union all from exports."o\'clock" '
        f"union all from crm.people union all select '4', text from read_csv('{exports}/notes.csv')"
    )
    attach = parse_attachments({"exports": "exports", "crm": "crm.duckdb"}, exports.parent)

    def answer(row: dict[str, Any]) -> dict[str, Any]:
        return {"answer": row["text"].upper(), "finish_reason": "eos"}

    run = night.prepare(workload, answer, attach=attach)
    run.write()
    assert night.sql("select note_id, sum from latest_note_sums order by all") == [
        ("1", "EXPORTS"), ("2", "BREAD"), ("3", "ANN"), ("4", "EXPORTS"),
    ]  # fmt: skip
    assert night.prepare(workload, answer, attach=attach).read.num_already_done == 4


@pytest.mark.parametrize("name", ["documents", "queries", "snippet_requests", "ranking_candidates"])
@pytest.mark.parametrize("is_new", [False, True])
def test_an_input_of_shipped_workloads_may_be_a_view_over_an_attachment(
    night: Any, tmp_path: Path, name: str, is_new: bool
) -> None:
    if is_new:  # a database without batchloom's outputs
        with duckdb.connect(str(tmp_path / "new.duckdb")) as connection:
            connection.execute(f"attach '{night.path}' as old (read_only)")
            for each in ("documents", "queries", "snippet_requests", "ranking_candidates"):
                connection.execute(f"create table {each} as from old.{each}")
        night.path = tmp_path / "new.duckdb"
    night.sql("insert into ranking_candidates values ('q1', 'd1'), ('q1', 'd2')")
    with duckdb.connect(str(night.path)) as connection:
        connection.execute(f"attach '{tmp_path}/crm.duckdb' as crm")
        connection.execute(f"create table crm.inputs as from {name}")
        connection.execute(f"drop table {name}")
        connection.execute(f"create view {name} as from crm.inputs")
    attach = {"crm": f"{tmp_path}/crm.duckdb"}

    def score(row: dict[str, Any]) -> dict[str, Any]:
        return {"score": len(row["body"]) / 10, "finish_reason": "scored", "label": "yes", "label_logprobs": [0.0, 0.0]}

    night.run(attach=attach)
    night.run("ranking", score, attach=attach)
    assert night.sql("select count(*) from latest_snippets where status = 'ok'") == [(3,)]
    assert night.sql("select rank from latest_rankings order by rank") == [(1,), (2,)]
    assert night.prepare(attach=attach).read.num_already_done == 3
    night.run(attach=attach, full=True)  # over the views of the first one


def test_sqlite_needs_its_extension(night: Any, make_workload: Any, tmp_path: Path) -> None:
    path = tmp_path / "crm.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("create table people (note_id text, text text)")
        connection.execute("insert into people values ('1', 'Ann')")
    connection.close()
    with duckdb.connect() as plain:
        (is_installed,) = plain.execute(
            "select installed from duckdb_extensions() where extension_name like 'sqlite%'"
        ).fetchall()[0]
    workload = make_workload("select note_id, text from crm.people")
    if is_installed:
        found = read.fn(make_source(night.path, attach={"crm": str(path)}), workload, make_folder(night))
        assert found.num_selected == 1
        return
    with pytest.raises(
        DatabaseError, match=r"attach: crm: .*extension 'sqlite_scanner' is not loaded here; install it"
    ):
        read.fn(make_source(night.path, attach={"crm": str(path)}), workload, make_folder(night))


def test_a_broken_attachment_is_named(night: Any, make_workload: Any, tmp_path: Path) -> None:
    (tmp_path / "crm.duckdb").write_text("not a database" * 1000)
    with pytest.raises(DatabaseError, match=r"attach: crm: .*crm.duckdb: "):
        read.fn(
            make_source(night.path, attach={"crm": str(tmp_path / "crm.duckdb")}),
            make_workload("select note_id, text from crm.people"),
            make_folder(night),
        )
    (tmp_path / "people.parquet").write_text("")
    for name, path, message in (
        ("crm", "people.parquet", f'people.parquet is a table; attach its folder: crm = "{tmp_path}"'),
        ("main", ".", "'main' is not a free name"),
        ("a b", ".", "'a b' is not a free name"),
        ("crm", "none", "crm: nothing is at "),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_attachments({name: path}, tmp_path)


@pytest.mark.parametrize(("one", "other"), [("mails.csv", "mails.json"), ("Mails.csv", "mails.csv")])
def test_two_files_of_one_name_are_refused(night: Any, make_workload: Any, exports: Path, one: str, other: str) -> None:
    for name in (one, other):
        (exports / name).write_text("note_id,text\n1,mail\n")
    workload = make_workload("select note_id, text from exports.mails")
    with pytest.raises(DatabaseError, match=f"attach: exports: {exports}: {one} and {other} would be one table"):
        read.fn(make_source(night.path, attach={"exports": str(exports)}), workload, make_folder(night))


def test_a_file_whose_name_is_a_pattern_is_refused(night: Any, make_workload: Any, exports: Path) -> None:
    """DuckDB would read mails1.csv in place of mails[1].csv."""
    for name in ("mails[1].csv", "mails1.csv"):
        (exports / name).write_text("note_id,text\n1,mail\n")
    workload = make_workload('select note_id, text from exports."mails[1]"')
    with pytest.raises(DatabaseError, match=rf"attach: exports: {exports}: mails\[1\].csv: DuckDB reads \[ in a path"):
        read.fn(make_source(night.path, attach={"exports": str(exports)}), workload, make_folder(night))


def test_no_setting_is_changed_back(night: Any) -> None:
    with connect(night.path) as connection:
        restrict_sql(connection, [], {})
        for setting in ("enable_external_access = true", "allowed_directories = ['/']", "threads = 2"):
            with pytest.raises(duckdb.Error, match="locked"):
                connection.execute(f"set {setting}")


def test_nights_use_few_of_many_threads(night: Any) -> None:
    """Each needs a part of the memory limit: with those of a host of 192 cores, large nights could not be written."""
    threads = "select current_setting('threads')"
    with duckdb.connect(str(night.path)) as ours:
        ours.execute("set threads = 192")
        for _ in range(2):  # the second time, settings are locked
            night.run()
            assert ours.execute(threads).fetchall() == [(4,)]
    with connect(night.path) as connection:
        connection.execute("set threads = 1")
        restrict_sql(connection, [], {})
        assert connection.execute(threads).fetchall() == [(1,)]


def test_a_connection_of_this_process_shares_the_restriction(night: Any, tmp_path: Path) -> None:
    with duckdb.connect(str(night.path)):
        for _ in range(2):
            with connect(night.path, read_only=True) as connection:
                restrict_sql(connection, [tmp_path], {})
        with (
            connect(night.path, read_only=True) as connection,
            pytest.raises(DatabaseError, match="close this process's other connections"),
        ):
            restrict_sql(connection, [Path("/etc")], {})
