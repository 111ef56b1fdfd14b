"""Queries and output tables that only the other workloads of a night, or the views that they make, put in the wrong."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import duckdb
import pytest

from engine.errors import ConfigError, DatabaseError
from tasks.database.connection import connect
from tasks.database.schema import create_schema
from tasks.nights.check_steps import check_in_turn, check_tables
from tasks.workloads.workload import Workload, load_workload

REPEAT = """
name = "{name}"
mode = "generate"
requests_sql = "{name}.sql"
key = ["mail_id"]
[prompt]
template = "Say it again: {{body}}"
[output]
table = "{table}"
answer_column = "body_again"
"""
READ_MAILS = "select mail_id, body from mails"
READ_ANSWERS = "select mail_id, body_again as body from "


@pytest.fixture
def database(tmp_path: Path) -> Path:
    with connect(tmp_path / "team.duckdb", create=True) as connection:
        connection.execute("create table mails (mail_id text, body text)")
    return tmp_path / "team.duckdb"


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Workload]:
    """A workload with this query and, unless it is given, a table of its own name."""

    def make(name: str, query: str, table: str = "") -> Workload:
        (tmp_path / f"{name}.toml").write_text(REPEAT.format(name=name, table=table or name))
        (tmp_path / f"{name}.sql").write_text(query)
        return load_workload(tmp_path / f"{name}.toml")

    return make


def answer(database: Path, *workloads: Workload) -> None:
    """Leave the tables and views that a night with these workloads leaves."""
    with connect(database) as connection:
        for workload in workloads:
            create_schema(connection, workload)


def say_why(database: Path, *workloads: Workload) -> str:
    with pytest.raises(DatabaseError) as caught:
        check_in_turn(database, workloads, {})
    return str(caught.value).removeprefix(str(database))


@pytest.mark.parametrize("view", ["latest_topics", "failed_topics", "open_topics", "Latest_Replies"])
def test_a_query_may_not_read_the_view_of_its_own_answers(
    database: Path, make: Callable[..., Workload], view: str
) -> None:
    """Neither itself, nor by a view of the user or of another workload, which may be of another night."""
    topics, replies = make("topics", READ_MAILS), make("replies", READ_ANSWERS + "latest_topics")
    answer(database, topics, replies)
    with duckdb.connect(str(database)) as connection:
        connection.execute("create view open_topics as from latest_topics where status = 'ok'")
    circular = make("topics", READ_MAILS + f" where mail_id not in (select mail_id from {view})")
    before = ": the query of workload 'topics' reads the view 'latest_topics' of its own answers"
    assert say_why(database, circular) == f"{before}, itself or by another view: let it read the table 'topics'"
    with pytest.raises(DatabaseError, match="infinite recursion"):
        answer(database, circular)
    check_in_turn(database, [make("topics", READ_MAILS + " where mail_id not in (select mail_id from topics)")], {})


def test_two_queries_may_not_read_each_other_s_answers(database: Path, make: Callable[..., Workload]) -> None:
    topics, replies = make("topics", READ_MAILS), make("replies", READ_ANSWERS + "latest_topics")
    check_in_turn(database, [topics, replies], {})
    answer(database, topics, replies)
    both = [make("topics", READ_ANSWERS + "latest_replies"), replies]
    assert "workload 'topics' reads the view 'latest_topics' of its own answers" in say_why(database, *both)
    with duckdb.connect(str(database)) as connection:
        connection.execute("drop view latest_topics; drop view latest_replies")
        connection.execute("create view latest_replies as select * from replies")
    assert "workload 'replies' reads the view 'latest_replies' of its own answers" in say_why(database, *both)


def test_documents_may_be_a_view_of_the_table_of_their_answers(database: Path, make: Callable[..., Workload]) -> None:
    workloads = [load_workload("snippets"), make("topics", READ_MAILS)]
    answer(database, *workloads)
    with duckdb.connect(str(database)) as connection:
        connection.execute("create table texts as from documents; drop table documents")
        view = "create or replace view documents as from texts where doc_id not in (select doc_id from {})"
        connection.execute(view.format("snippets"))
        check_in_turn(database, workloads, {})
        connection.execute(view.format("latest_snippets"))
        why = say_why(database, *workloads)
        assert "in the query of workload 'snippets': " in why
        assert 'recursively bind view "documents"' in why


@pytest.mark.parametrize("view", ["latest_topics", "FAILED_topics"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_table_may_not_have_the_name_of_a_view_of_another_workload(
    database: Path, make: Callable[..., Workload], view: str, is_first: bool
) -> None:
    topics, other = make("topics", READ_MAILS), make("other", READ_MAILS, view)
    workloads = [other, topics] if is_first else [topics, other]
    there, needed = ("table", "view") if is_first else ("view", "table")
    assert say_why(database, *workloads) == (
        f", as the workloads before {workloads[1].name!r} leave it: {view.lower()!r} is a {there};"
        f" batchloom needs a {needed} of that name"
    )


@pytest.mark.parametrize("name", ["batchloom_planned", "temp", "system", "information_schema"])
def test_a_database_may_have_any_name(name: str, tmp_path: Path, make: Callable[..., Workload]) -> None:
    with connect(tmp_path / f"{name}.duckdb", create=True) as connection:
        connection.execute("create table mails (mail_id text, body text)")
    check_in_turn(tmp_path / f"{name}.duckdb", [make("first", READ_MAILS), make("second", f"{READ_ANSWERS} first")], {})


def test_queries_may_read_other_schemas_of_the_database(database: Path, make: Callable[..., Workload]) -> None:
    with connect(database) as connection:
        connection.execute("create schema staging")
        connection.execute("create table staging.notes as select 'l1' as mail_id, 'x' as body")
        connection.execute("create macro staging.cut(body) as left(body, 3)")
        connection.execute("create view today as select mail_id, staging.cut(body) as body from staging.notes")
    letters = make("letters", "select mail_id, staging.cut(body) as body from Staging.notes")
    again = make("again", f"{READ_ANSWERS} latest_letters")
    check_in_turn(database, [letters, again, make("viewed", "from today")], {})
    check_in_turn(database, [make("viewed", "from today")], {})
    answer(database, letters)
    with connect(database, read_only=True) as connection:
        assert connection.execute("from latest_letters").fetchall() == []
    assert "no table or view 'notes'" in say_why(database, make("unqualified", "select mail_id, body from notes"))
    assert "no table or view 'mails'" in say_why(database, make("none", "select mail_id, body from staging.mails"))


def test_workloads_have_names_of_their_own() -> None:
    snippets, ranking = load_workload("snippets"), load_workload("ranking")
    check_tables([snippets, ranking])
    with pytest.raises(ConfigError, match=r"workloads snippets and ranking are both called 'Snippets': each .* name"):
        check_tables([snippets, replace(ranking, name="Snippets")])
