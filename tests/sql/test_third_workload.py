"""The example of docs/workloads.md, taken from the page and run; and names with SQL in them."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest

from engine.errors import DatabaseError, WorkloadError
from tasks.database.connection import connect
from tasks.database.schema import create_schema
from tasks.report_page.facts import read_run, read_run_facts
from tasks.sample import take_requests
from tasks.workloads.workload import load_workload
from tests.sql.conftest import Night

SQL = Path(__file__).parents[2] / "sql"
PAGE = Path(__file__).parents[2] / "docs" / "workloads.md"
BLOCKS = dict(re.findall(r"^```\w+ (\S+)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))


@pytest.fixture
def tickets(tidy_path: Path) -> Night:
    """A database with only the page's tickets."""
    tickets = Night(tidy_path / "tickets.duckdb")
    tickets.sql(BLOCKS["setup"])
    return tickets


@pytest.fixture
def topics(tmp_path: Path) -> Path:
    for name in ("topics.toml", "select_tickets.sql"):
        (tmp_path / name).write_text(BLOCKS[name])
    return tmp_path / "topics.toml"


def sort(row: dict[str, Any]) -> dict[str, Any]:
    labels = {"t-1": "billing", "t-2": "delivery", "t-3": "account"}
    label = labels[row["ticket_id"]]
    return {"score": float(label == "billing"), "label": label, "label_logprobs": [0.0] * 4, "finish_reason": "scored"}


@pytest.mark.parametrize("table", ["Antworten Ü", "Zettel"])
def test_a_report_of_a_table_with_capitals(tickets: Any, topics: Path, table: str) -> None:
    topics.write_text(topics.read_text().replace('table = "ticket_topics"', f'table = "{table}"'))
    workload = load_workload(topics)
    assert workload.output.table == table
    tickets.run(workload, sort)
    with connect(tickets.path, read_only=True) as connection:
        assert read_run_facts(connection, read_run(connection)).cached_shares


def test_the_page_s_example(tickets: Any, topics: Path) -> None:
    workload = load_workload(topics)
    assert workload.kind.labels == ("billing", "delivery", "account", "other")
    assert workload.prompt.segments[-1] == ("\nTopic: ", None)
    assert workload.prompt.system == ""
    run = tickets.run(workload, sort)
    assert [(row["subject"], row["message"], row["error"]) for row in run.rows()] == [
        ("Card", "I was charged twice for my May order.", None),
        ("", "The parcel says delivered, but it never came.", None),
        ("Password", "I cannot sign in since yesterday.", None),
        (None, None, "message is NULL"),
    ]
    assert tickets.sql(BLOCKS["query"]) == [
        ("t-1", "billing", "ok", None),
        ("t-2", "delivery", "ok", None),
        ("t-3", "account", "ok", None),
        ("t-4", None, "error", "message is NULL"),
    ]
    assert tickets.sql("select ticket_id, error from failed_ticket_topics") == [("t-4", "message is NULL")]
    assert tickets.prepare(workload).read.num_already_done == 4
    names = {name for (name,) in tickets.sql("select table_name from information_schema.tables")}
    assert names == {"tickets", "ticket_topics", "latest_ticket_topics", "failed_ticket_topics"} | {
        "runs",
        "steps",
        "run_summary",
    }, "nothing that this workload does not need"


def test_its_views_follow_the_query(tickets: Any, topics: Path) -> None:
    workload = load_workload(topics)
    tickets.run(workload, sort)
    tickets.sql("delete from tickets where ticket_id = 't-1'")
    tickets.sql("update tickets set message = repeat('x', 20001) where ticket_id = 't-2'")
    assert tickets.sql(BLOCKS["query"]) == [("t-3", "account", "ok", None), ("t-4", None, "error", "message is NULL")]
    tickets.run(workload, sort)
    assert tickets.sql("select ticket_id, error from failed_ticket_topics order by all") == [
        ("t-2", "message is longer than 20000 bytes"),
        ("t-4", "message is NULL"),
    ]
    tickets.sql("update tickets set message = 'back' where ticket_id = 't-4'")
    changed = tickets.prepare(workload, lambda row: None)
    assert [row["ticket_id"] for row in changed.rows()] == ["t-4"]


def test_a_deleted_content_of_a_key_is_not_shown_after_the_next_night(tickets: Any, topics: Path) -> None:
    workload, shown = load_workload(topics), "select label from latest_ticket_topics where ticket_id = 't-1'"

    def answer(row: dict[str, Any]) -> dict[str, Any]:
        return sort(row) | {"label": "billing" if "charged" in row["message"] else "other"}

    tickets.sql("insert into tickets values ('t-1', 'Card', 'Where is my parcel?')")
    tickets.run(workload, answer)
    assert tickets.prepare(workload).read.num_already_done == 5, "both contents stay answered"
    ((label,),) = tickets.sql(shown)
    tickets.sql("delete from tickets where ticket_id = 't-1' and (message like '%charged%') = (? = 'billing')", [label])
    tickets.run(workload, answer)
    assert tickets.sql(shown) == [("other" if label == "billing" else "billing",)]
    assert tickets.prepare(workload).read.num_already_done == 4


def test_rows_that_the_view_will_not_show_are_counted(tickets: Any, topics: Path) -> None:
    """Two contents of a key, also where they are on both sides of a batch's end; equal rows have equal answers."""
    workload = load_workload(topics)
    assert tickets.prepare(workload, lambda row: None).read.num_hidden == 0
    tickets.sql("insert into tickets from tickets where ticket_id = 't-2'")
    tickets.sql("insert into tickets values (null, 'Card', 'Where?'), (null, 'Card', 'Who?')")
    assert tickets.prepare(workload, lambda row: None).read.num_hidden == 0
    num_contents = "select 'x' || i // 3, 'Card', 'Text ' || i % 3 from range(9000) as x (i)"  # three of each key
    tickets.sql(f"insert into tickets {num_contents}")
    assert tickets.prepare(workload, lambda row: None).read.num_hidden == 6000


def test_its_views_do_not_depend_on_the_reader_s_time_zone(tickets: Any, topics: Path) -> None:
    """Keys with a time zone are text in UTC in the output table."""
    topics.write_text(BLOCKS["topics.toml"].replace('["ticket_id"]', '["ticket_id", "Opened At"]'))
    times = "['2026-03-29 00:30+00', 'infinity', null]"
    (topics.parent / "select_tickets.sql").write_text(
        f"select *, ({times})[ticket_id[3]::int]::timestamptz as \"opened at\" from tickets where ticket_id <> 't-4'"
    )
    tickets.run(load_workload(topics), sort)
    for zone in ("UTC", "America/New_York", "Asia/Kolkata"):
        with duckdb.connect(str(tickets.path), read_only=True) as reader:
            reader.execute(f"set timezone = '{zone}'")
            found = reader.execute('select "Opened At", error from latest_ticket_topics order by ticket_id').fetchall()
        assert found == [("2026-03-29 00:30:00+00", None), ("infinity", None), (None, "Opened At is NULL")], zone


@pytest.mark.parametrize(
    ("opened", "text"),
    [
        ("[time, 'infinity', null]", "['2026-03-29 00:30:00+00', infinity, NULL]"),
        ("array_value(time, time + interval 1 day)", "['2026-03-29 00:30:00+00', '2026-03-30 00:30:00+00']"),
        (
            """{'by': 'it''s, "me" [NULL] {é} \\', 'At Once': [{t: time}], kind: 'a'::enum('a', 'b')}""",
            """{'by': 'it\\'s, "me" [NULL] {é} \\\\', 'At Once': [{'t': '2026-03-29 00:30:00+00'}], 'kind': a}""",
        ),
        ("map {time: ' x '}", "{'2026-03-29 00:30:00+00'=' x '}"),
        ("['1800-03-29 00:30+00'::timestamptz]", "['1800-03-29 00:30:00+00']"),  # when zones differed by seconds
        ("row(time, 1)", "('2026-03-29 00:30:00+00', 1)"),
    ],
)
def test_nor_do_they_where_the_time_is_in_a_list_or_struct(tickets: Any, topics: Path, opened: str, text: str) -> None:
    topics.write_text(BLOCKS["topics.toml"].replace('["ticket_id"]', '["ticket_id", "opened"]'))
    (topics.parent / "select_tickets.sql").write_text(
        f"select *, {opened} as opened from tickets, (select '2026-03-29 00:30+00'::timestamptz as time)"
    )
    tickets.run(load_workload(topics), sort)
    for zone in ("UTC", "America/New_York", "Asia/Kolkata"):
        with duckdb.connect(str(tickets.path), read_only=True) as reader:
            reader.execute(f"set timezone = '{zone}'")
            found = reader.execute("select opened, status from latest_ticket_topics order by ticket_id").fetchall()
        assert found == [*[(text, "ok")] * 3, (text, "error")], zone


def test_a_column_of_the_query_is_a_priority_only_if_the_workload_says_so(tickets: Any, topics: Path) -> None:
    (topics.parent / "select_tickets.sql").write_text("select *, ticket_id as row_priority from tickets")
    assert {row["row_priority"] for row in tickets.prepare(load_workload(topics), sort).rows()} == {0}


def test_an_own_table_has_the_columns_of_a_shipped_one(night: Any) -> None:
    def columns(table: str) -> list[tuple[str, str]]:
        found = night.sql(f"select column_name, column_type from (describe {table})")
        return [(str(name), str(kind)) for name, kind in found]

    for name, shipped in (("snippets", "snippets"), ("ranking", "rankings")):
        workload = load_workload(name)
        own = replace(workload, kind=replace(workload.kind, output=replace(workload.output, table="own_" + shipped)))
        with connect(night.path) as connection:
            create_schema(connection, own)
        assert columns("own_" + shipped) == columns(shipped)
        assert columns("latest_own_" + shipped) == columns(shipped)


@pytest.mark.parametrize("key", ["ticket_id", "answer_rowid", "rank_group"])
def test_ranks_and_repeated_rows_of_an_own_table(tickets: Any, topics: Path, key: str) -> None:
    text = topics.read_text().replace('key = ["ticket_id"]', f'key = ["subject", "{key}"]')
    topics.write_text(text + 'rank_within = "subject"\n')
    (topics.parent / "select_tickets.sql").write_text(f"select *, ticket_id as {key} from tickets")
    tickets.sql("update tickets set subject = 'same', message = 'm' || ticket_id")
    tickets.sql("insert into tickets select * from tickets where ticket_id = 't-1'")
    tickets.run(load_workload(topics), lambda row: {"score": 0.5, "finish_reason": "scored"})
    assert tickets.sql(f"select {key}, rank from ticket_topics order by all") == [
        ("t-1", 1),
        ("t-1", 1),
        ("t-2", 2),
        ("t-3", 3),
        ("t-4", 4),
    ]


def test_the_same_rows_are_found_by_a_key_of_any_name(tickets: Any, topics: Path, tmp_path: Path) -> None:
    topics.write_text(topics.read_text().replace('key = ["ticket_id"]', 'key = ["chosen_id"]'))
    (topics.parent / "select_tickets.sql").write_text("select *, ticket_id as chosen_id from tickets")
    requests = tickets.prepare(load_workload(topics), lambda row: None).read.requests
    chosen, target = {"chosen": requests.path}, tmp_path / "same.parquet"
    same = take_requests.fn("compare/take_same_rows", requests, chosen, target, keys=("chosen_id",))
    assert pq.read_table(same.path) == pq.read_table(requests.path)


@pytest.mark.parametrize("rank_within", ["subject", "newest", "listed"])
def test_ranks_of_the_latest_view_count_its_rows(tickets: Any, topics: Path, rank_within: str) -> None:
    """As those of latest_rankings: without gaps where rows are gone, failed or not written in the same run."""
    text = topics.read_text().replace('key = ["ticket_id"]', f'key = ["{rank_within}", "ticket_id"]')
    topics.write_text(text)
    (topics.parent / "select_tickets.sql").write_text(
        f"select *, if(ticket_id < 't-5', 'one', 'two') as {rank_within} from tickets"
        if rank_within != "subject"
        else "select * replace (if(ticket_id < 't-5', 'one', 'two') as subject) from tickets"
    )
    tickets.sql(
        "update tickets set message = ticket_id; insert into tickets select 't-' || i, '', i from range(5, 8) t(i)"
    )
    scores = {"t-1": 0.9, "t-2": 0.5, "t-3": 0.7, "t-4": 0.5, "t-5": 0.1, "t-6": 0.2, "t-7": None}

    def answer(row: dict[str, Any]) -> dict[str, Any]:
        score = scores[row["ticket_id"]]
        failed = {"error": "engine", "finish_reason": "error"}
        return failed if score is None else {"score": score, "label": "billing", "finish_reason": "scored"}

    tickets.run(load_workload(topics), answer)
    latest = f"select ticket_id, rank from latest_ticket_topics order by {rank_within}, rank, ticket_id"
    assert tickets.sql(latest) == [(f"t-{number}", None) for number in range(1, 8)]

    topics.write_text(topics.read_text() + f'rank_within = "{rank_within}"\n')
    scores["t-7"] = 0.15
    tickets.run(load_workload(topics), answer)
    ranked = [("t-1", 1), ("t-3", 2), ("t-2", 3), ("t-4", 4), ("t-6", 1), ("t-7", 2), ("t-5", 3)]
    assert tickets.sql(latest) == ranked
    tickets.sql("delete from tickets where ticket_id in ('t-1', 't-6')")
    assert tickets.sql(latest) == [("t-3", 1), ("t-2", 2), ("t-4", 3), ("t-7", 1), ("t-5", 2)]
    assert tickets.sql("select typeof(rank) from latest_ticket_topics limit 1") == [("INTEGER",)]
    tickets.sql("update tickets set message = null where ticket_id = 't-3'")
    tickets.run(load_workload(topics), answer)
    assert tickets.sql(latest) == [("t-2", 1), ("t-4", 2), ("t-3", None), ("t-7", 1), ("t-5", 2)]


@pytest.mark.parametrize("name", ["ranked", "newest", "touched"])
def test_ranks_are_written_to_a_table_of_any_name(tickets: Any, topics: Path, name: str) -> None:
    text = topics.read_text().replace('"ticket_topics"', f'"{name}"') + 'rank_within = "ticket_id"\n'
    topics.write_text(text)
    tickets.run(load_workload(topics), sort)
    assert tickets.sql(f"select ticket_id, rank from {name} where status = 'ok' order by all") == [
        ("t-1", 1),
        ("t-2", 1),
        ("t-3", 1),
    ]


EVIL = ['x"; drop table tickets; --', "x'); drop table tickets; --", "a b", "select", "Größe", "{keys}", "x\\1"]
EVIL += ["<keys>", "a<requests>%", "{<rank>}"]


@pytest.mark.parametrize("evil", EVIL)
def test_names_cannot_be_sql(tickets: Any, topics: Path, evil: str) -> None:
    text = topics.read_text().replace('table = "ticket_topics"', f"table = '''{evil}'''\nanswer_column = '''{evil}2'''")
    text = text.replace('mode = "score" ', 'mode = "generate" ').replace("labels", "#")
    text = text.replace('key = ["ticket_id"]', f"key = ['''{evil}''']")
    topics.write_text(text)
    quoted = '"' + evil.replace('"', '""') + '"'
    query = topics.with_name("select_tickets.sql")
    query.write_text(f"select ticket_id as {quoted}, subject, message from tickets")
    run = tickets.run(load_workload(topics), lambda row: {"answer": row["message"], "finish_reason": "eos"})
    assert run.read.num_selected == 4
    assert tickets.sql("select count(*) from tickets") == [(4,)]
    latest, answer = '"latest_' + quoted[1:], quoted[:-1] + '2"'
    assert tickets.sql(f"select {quoted}, {answer} from {latest} where status = 'ok' order by all") == [
        ("t-1", "I was charged twice for my May order."),
        ("t-2", "The parcel says delivered, but it never came."),
        ("t-3", "I cannot sign in since yesterday."),
    ]
    assert tickets.prepare(load_workload(topics)).read.num_selected == 0


@pytest.mark.parametrize(
    "query",
    [
        "select ticket_id, subject, message from tickets; drop table tickets",
        "drop table tickets",
        "select ticket_id, subject, message form tickets",
        "select 1) ; drop table tickets; --",
        "insert into tickets values ('x', 'y', 'z') returning *",
        "select ticket_id, subject, message from tickets where ticket_id = $model_digest",
    ],
)
def test_the_query_is_one_select(tickets: Any, topics: Path, query: str) -> None:
    topics.with_name("select_tickets.sql").write_text(query)
    with pytest.raises(DatabaseError, match="in the query of workload 'topics': "):
        tickets.prepare(load_workload(topics))
    with pytest.raises(DatabaseError), connect(tickets.path) as connection:
        create_schema(connection, load_workload(topics))
    assert tickets.sql("select count(*) from tickets") == [(4,)]


@pytest.mark.parametrize(
    ("value", "why"),
    [("message::integer::varchar", "Conversion Error: "), ("error('no message')", "Invalid Input Error: no message")],
)
def test_a_value_that_the_query_cannot_compute_is_an_error_of_the_workload(
    tickets: Any, topics: Path, value: str, why: str
) -> None:
    topics.with_name("select_tickets.sql").write_text(f"select ticket_id, subject, {value} as message from tickets")
    with pytest.raises(DatabaseError, match=f"in the query of workload 'topics': {why}"):
        tickets.prepare(load_workload(topics))


def test_so_is_one_that_comes_after_rows_that_were_read(tickets: Any, topics: Path) -> None:
    tickets.sql("insert into tickets select i, 'Number', if(i < 4999, '1', 'abc') from range(5000) as many (i)")
    query = "select ticket_id, subject, message::integer::varchar as message from tickets where subject = 'Number'"
    topics.with_name("select_tickets.sql").write_text(query)
    with pytest.raises(DatabaseError, match="in the query of workload 'topics': Conversion Error: ") as caught:
        tickets.prepare(load_workload(topics))
    assert "'abc'" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("parameter", ["$number", "?", "$1"])
@pytest.mark.parametrize("column", ["message", "{} as message"])
def test_a_query_has_no_parameters(tickets: Any, topics: Path, parameter: str, column: str) -> None:
    where = f" where ticket_id = {parameter}" if column == "message" else ""
    query = f"select ticket_id, subject, {column.format(parameter)} from tickets{where}"
    topics.with_name("select_tickets.sql").write_text(query)
    problem = r"in the query of workload 'topics': a parameter that has no value \(write the value into the query\)"
    with pytest.raises(DatabaseError, match=problem):
        tickets.prepare(load_workload(topics))


@pytest.mark.parametrize(
    ("query", "tables"),
    [
        ("select ticket_id, subject, message, 'it''s' as note from tickets;\n-- the end", []),
        ("select ticket_id, subject, message from tickets -- it's the end", []),
        ("select ticket_id, subject, message from newest", ["newest"]),
        ("select ticket_id, subject, message from requested", ["requested"]),
        ("select ticket_id, subject, message from newest_answers", ["newest_answers"]),
        ("select ticket_id, null as subject, message from tickets", []),
        ("select * from newest union all by name select * from texts where false", ["newest", "texts"]),
    ],
)
def test_a_query_in_another_statement_is_the_query_alone(
    tickets: Any, topics: Path, query: str, tables: list[str]
) -> None:
    """A semicolon or a comment ends nothing but the query; its tables may have the names that statements use."""
    for table in tables:
        tickets.sql(f"create table {table} as from tickets")
    topics.with_name("select_tickets.sql").write_text(query)
    tickets.run(load_workload(topics), sort)
    assert tickets.sql(BLOCKS["query"]) == [
        ("t-1", "billing", "ok", None),
        ("t-2", "delivery", "ok", None),
        ("t-3", "account", "ok", None),
        ("t-4", None, "error", "message is NULL"),
    ]
    assert tickets.prepare(load_workload(topics)).read.num_selected == 0


@pytest.mark.parametrize("name", ["newest", "texts", "requested", "listed"])
def test_an_output_table_may_have_a_name_that_the_view_uses(tickets: Any, topics: Path, name: str) -> None:
    topics.write_text(topics.read_text().replace('"ticket_topics"', f'"{name}"'))
    tickets.run(load_workload(topics), sort)
    query = BLOCKS["query"].replace("latest_ticket_topics", f"latest_{name}")
    assert [row[:2] for row in tickets.sql(query)] == [
        ("t-1", "billing"),
        ("t-2", "delivery"),
        ("t-3", "account"),
        ("t-4", None),
    ]


def test_a_query_that_returns_too_little(tickets: Any, topics: Path) -> None:
    topics.with_name("select_tickets.sql").write_text("select ticket_id, message from tickets")
    with pytest.raises(DatabaseError) as caught:
        tickets.prepare(load_workload(topics))
    assert str(caught.value) == (
        f"{tickets.path}: the query of workload 'topics' returns no column 'subject'; it returns ticket_id, message"
    )


def test_a_query_that_returns_a_column_in_two_spellings(tickets: Any, topics: Path) -> None:
    """DuckDB would take the first; a column that nobody uses may be there twice."""
    query = "select ticket_id, subject, 1 as other, 2 as OTHER, message, '' as \"Message\" from tickets"
    topics.with_name("select_tickets.sql").write_text(query)
    with pytest.raises(DatabaseError) as caught:
        tickets.prepare(load_workload(topics))
    why = "returns message and Message, which are one name in DuckDB: leave one out"
    assert str(caught.value) == f"{tickets.path}: the query of workload 'topics' {why}"
    topics.with_name("select_tickets.sql").write_text(query.replace(", '' as \"Message\"", ""))
    tickets.run(load_workload(topics), sort)


def test_a_query_that_fails_halfway_leaves_no_artifact(tickets: Any, topics: Path, tmp_path: Path) -> None:
    topics.with_name("select_tickets.sql").write_text(
        "select ticket_id, subject, message, (ticket_id[3:] || subject)::integer::text as error from tickets"
    )
    with pytest.raises(DatabaseError, match="Could not convert string '1Card' to INT32"):
        tickets.prepare(load_workload(topics))
    assert not list(tmp_path.rglob("requests.parquet"))


def test_an_output_table_of_somebody_else(tickets: Any, topics: Path) -> None:
    topics.write_text(topics.read_text().replace('"ticket_topics"', '"tickets"'))
    with pytest.raises(DatabaseError, match="table 'tickets' is not batchloom's"):
        tickets.prepare(load_workload(topics))
    topics.write_text(topics.read_text().replace('"tickets"', '"snippets"'))
    with pytest.raises(WorkloadError, match="table may not be 'snippets', whose views show rows of"):
        load_workload(topics)


def test_names_that_batchloom_uses_itself(topics: Path) -> None:
    text = topics.read_text()
    statements = [path.read_text() for path in SQL.rglob("*.sql") if path.parent.name != "demo"]
    created = re.compile(r"^create (?:table if not exists|or replace view) (\w+)", re.MULTILINE)
    answers = {"snippets", "latest_snippets", "rankings", "latest_rankings"}
    names = {name for statement in statements for name in created.findall(statement)} - answers
    assert {"runs", "evaluations", "run_summary"} < names
    for name in names:
        topics.write_text(text.replace('"ticket_topics"', f'"{name.upper()}"'))
        with pytest.raises(WorkloadError, match=f"table may not be '{name.upper()}'"):
            load_workload(topics)


@pytest.mark.parametrize("error", ["", "  "])
def test_an_error_without_a_reason_is_none(tickets: Any, topics: Path, error: str) -> None:
    """As a query gives it that writes '' for "no error": the row is answered, and its answer is shown."""
    topics.with_name("select_tickets.sql").write_text(
        f"select ticket_id, subject, message, '{error}' as error from tickets"
    )
    tickets.run(load_workload(topics), sort)
    assert [row[:2] for row in tickets.sql(BLOCKS["query"])] == [
        ("t-1", "billing"),
        ("t-2", "delivery"),
        ("t-3", "account"),
        ("t-4", None),
    ]
    null = topics.with_name("select_tickets.sql").read_text().replace(f"'{error}'", "null")
    topics.with_name("select_tickets.sql").write_text(null)
    assert tickets.prepare(load_workload(topics)).read.num_selected == 0
