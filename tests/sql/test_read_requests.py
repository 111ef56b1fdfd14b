"""Every row of the workload's query comes out once: with its text, or with the reason why it has none."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from engine.errors import DatabaseError
from tasks.answers.text import Decoding
from tasks.database.connection import connect
from tasks.read import AnswerLength, read_answer_length, requests_schema
from tasks.storage.artifact import open_parquet
from tasks.workloads.workload import load_workload

BAD = b"bad \xff byte"


def errors(run: Any) -> dict[tuple[Any, ...], str | None]:
    return {tuple(row[key] for key in run.workload.key): row["error"] for row in run.rows()}


def load_bytes(path: Path, table: str, rows: list[tuple[bytes | None, ...]]) -> None:
    """Append rows of raw bytes to text columns through Arrow, as an importer with unchecked buffers would.

    DuckDB checks text that comes this way only as long as a column holds nothing beyond ASCII; hence the first row.
    """
    with duckdb.connect(str(path)) as connection:
        names = [row[0] for row in connection.execute(f"describe {table}").fetchall()]
        columns = []
        for values in zip(*[tuple("é".encode() for _ in names), *rows], strict=True):
            binary = pa.array(values, pa.binary())
            columns.append(pa.Array.from_buffers(pa.string(), len(values), binary.buffers()))
        batch = pa.table(columns, names=names)
        connection.register("batch", batch)
        connection.execute(f"insert into {table} select * from batch")


def test_rows_come_in_key_order_whatever_the_order_in_the_table(night: Any) -> None:
    first = night.prepare()
    assert [(row["row_id"], row["doc_id"], row["query_id"], row["title"], row["body"]) for row in first.rows()] == [
        (0, "d1", "q1", "One", "body 1"),
        (1, "d1", "q2", "One", "body 1"),
        (2, "d2", "q1", "", "body 2"),
    ]
    assert (first.read.num_selected, first.read.num_already_done, first.read.reasons) == (3, 0, {"new": 3})
    with open_parquet(first.read.requests) as file:
        assert file.schema_arrow.equals(requests_schema(first.workload))
    for seed in range(3):
        for table in ("documents", "queries", "snippet_requests"):
            rows = night.sql(f"from {table}")
            random.Random(seed).shuffle(rows)
            night.sql(f"delete from {table}")
            for row in rows:
                night.sql(f"insert into {table} values ({', '.join('?' for _ in row)})", row)
        assert night.prepare().rows() == first.rows()


def test_a_workload_may_spell_columns_in_other_case_than_its_query(night: Any) -> None:
    shipped = load_workload("snippets")
    prompt = replace(shipped.prompt, template=shipped.prompt.template.replace("{body}", "{Body}"))
    other = replace(shipped, prompt=prompt, key=("Doc_ID", "query_id"))
    night.prepare(other, lambda row: {"answer": row["Body"], "finish_reason": "eos"}).write()
    assert night.sql("select distinct doc_id, snippet from latest_snippets order by all") == [
        ("d1", "body 1"),
        ("d2", "body 2"),
    ]
    assert night.prepare(other).read.num_already_done == 3


def test_each_row_that_cannot_be_answered_names_its_reason(night: Any) -> None:
    night.sql("insert into documents values ('null', 't', null), ('blank', 't', ' \n\t'), ('empty', 't', '')")
    night.sql("insert into documents values ('twice', 't', 'a'), ('twice', 't', 'b'), (null, 't', 'c')")
    night.sql("insert into queries values ('no text', null), ('blank', ''), ('twice', 'a'), ('twice', 'b')")
    doc_ids = ["null", "blank", "empty", "twice", "absent", None, ""]
    night.sql("insert into snippet_requests select unnest(?::text[]), 'q1'", [doc_ids])
    night.sql("insert into snippet_requests select 'd1', unnest(?)", [["no text", "blank", "twice", "absent", None]])
    run = night.prepare()
    assert errors(run) == {
        ("d1", "q1"): None,
        ("d1", "q2"): None,
        ("d2", "q1"): None,
        ("null", "q1"): "body is NULL",
        ("blank", "q1"): "body is empty",
        ("empty", "q1"): "body is empty",
        ("twice", "q1"): "doc_id 'twice' has 2 rows in documents",
        ("absent", "q1"): "doc_id 'absent' is not in documents",
        (None, "q1"): "doc_id is NULL",
        ("", "q1"): "doc_id is empty",
        ("d1", "no text"): "query_text is NULL",
        ("d1", "blank"): "query_text is empty",
        ("d1", "twice"): "query_id 'twice' has 2 rows in queries",
        ("d1", "absent"): "query_id 'absent' is not in queries",
        ("d1", None): "query_id is NULL",
    }
    assert all(row["body"] is None for row in run.rows() if row["error"]), "no prompt, no text"
    assert run.read.reasons == {"new": 15}


def test_it_is_counted_why_rows_are_to_be_answered(night: Any) -> None:
    changed = "with another text, prompt or model than before"

    def fail_one(row: dict[str, Any]) -> dict[str, Any]:
        return {"finish_reason": "error", "error": "a bad tile"} if row["doc_id"] == "d2" else {"answer": "fine"}

    night.run(answer=lambda row: {"finish_reason": "eos"} | fail_one(row))
    night.sql("update documents set body = 'other' where doc_id = 'd1'")
    night.sql("insert into snippet_requests values ('d2', 'q2'), ('absent', 'q1')")
    assert night.prepare().read.reasons == {changed: 2, "new": 2, "failed before": 1}
    night.run()
    night.sql("update documents set body = 'body 1' where doc_id = 'd1'")
    found = night.prepare().read
    assert (found.reasons, found.num_already_done) == ({changed: 2}, 3), "the older answers do not count"
    assert night.prepare(model_digest="model-2").read.reasons == {changed: 5}


def test_a_row_of_two_nulls_and_a_repeated_pair_stay_rows(night: Any) -> None:
    night.sql("insert into snippet_requests values (null, null), (null, null), ('d1', 'q1')")
    keys = [(row["doc_id"], row["query_id"]) for row in night.prepare().rows()]
    assert keys == [("d1", "q1"), ("d1", "q1"), ("d1", "q2"), ("d2", "q1"), (None, None), (None, None)]


@pytest.mark.parametrize("column", ["title", "body"])
def test_bytes_that_are_not_utf8_make_their_own_row_an_error(night: Any, column: str) -> None:
    row = {"doc_id": b"bad", "title": b"t", "body": "longer than one inlined string, and é".encode()} | {column: BAD}
    load_bytes(night.path, "documents", [tuple(row.values())])
    night.sql("insert into snippet_requests values ('bad', 'q1')")
    run = night.run()
    assert errors(run) == {
        ("bad", "q1"): f"{column} holds bytes that are not UTF-8",
        ("d1", "q1"): None,
        ("d1", "q2"): None,
        ("d2", "q1"): None,
    }
    assert night.sql("select finish_reason, error from latest_snippets where status = 'error'") == [
        ("invalid", f"{column} holds bytes that are not UTF-8")
    ]
    assert night.prepare().read.num_already_done == 4, "it fails again until its bytes change"


def test_bytes_that_are_not_utf8_in_an_id(night: Any) -> None:
    load_bytes(night.path, "documents", [(b"d\xff", b"t", b"body")])
    load_bytes(night.path, "snippet_requests", [(b"d\xff", b"q1"), (b"d1", b"\xed\xa0\x80")])
    run = night.run()
    found = errors(run)
    assert found[("d?", "q1")] == "doc_id holds bytes that are not UTF-8"
    assert [error for (doc, _), error in found.items() if doc == "d1"].count(
        "query_id holds bytes that are not UTF-8"
    ) == 1
    assert len(run.rows()) == 6
    assert night.sql("select count(*) from latest_snippets") == [(6,)]
    assert night.prepare().read.num_selected == 0


def test_a_blob_column_serves_as_text_where_its_bytes_do(night: Any) -> None:
    night.sql("alter table documents alter body type blob using encode(body)")
    body = "\\x41 é \0"
    night.sql("insert into documents values ('bad', 't', ?), ('e', 't', ?)", [BAD, body.encode()])
    night.sql("insert into snippet_requests values ('bad', 'q1'), ('e', 'q1')")
    run = night.prepare()
    found = [(row["doc_id"], row["body"]) for row in run.rows() if row["error"] is None]
    assert found[-2:] == [("d2", "body 2"), ("e", body)]
    assert errors(run)[("bad", "q1")] == "body holds bytes that are not UTF-8"


def test_control_characters_and_scripts_come_through_unchanged(night: Any) -> None:
    body = "NUL \x00, quotes ' \" `, 夜警, 🎉, <|im_end|>\r\n"
    night.sql("update documents set body = ? where doc_id = 'd1'", [body])
    assert night.prepare().rows()[0]["body"] == body


def test_ids_of_another_type_read_as_text(night: Any) -> None:
    night.sql("create or replace table documents as select 7 as doc_id, 't' as title, 'body 7' as body")
    night.sql("create or replace table snippet_requests as select 7::bigint as doc_id, 'q1' as query_id")
    assert [(row["doc_id"], row["body"]) for row in night.run().rows()] == [("7", "body 7")]
    assert night.sql("select doc_id, status from latest_snippets") == [("7", "ok")]
    assert night.prepare().read.num_already_done == 1


def test_ids_and_texts_may_be_variants(night: Any) -> None:
    night.sql(
        "create or replace table documents as select 7::variant as doc_id, 3::variant as title, 2.5::variant as body"
    )
    night.sql("insert into documents values ('x', 'title', {'a': 1}::variant)")
    night.sql("create or replace table snippet_requests as select doc_id, 'q1' as query_id from documents")
    rows = [(row["doc_id"], row["title"], row["body"]) for row in night.run().rows()]
    assert rows == [("7", "3", "2.5"), ("x", "title", "{'a': 1}")]
    assert night.prepare().read.num_already_done == 2


def test_a_template_may_spell_columns_with_other_capitals(night: Any) -> None:
    workload = load_workload("snippets")
    prompt = replace(workload.prompt, template="{Title}: {BODY} {query_text}", may_be_empty=("Title",))
    texts = [
        (row["Title"], row["BODY"]) for row in night.prepare(replace(workload, prompt=prompt), lambda row: None).rows()
    ]
    assert texts == [("One", "body 1"), ("One", "body 1"), ("", "body 2")]


def test_only_what_changed_is_read_again(night: Any) -> None:
    night.run()
    again = night.prepare()
    assert (again.read.num_selected, again.read.num_already_done) == (0, 3)
    night.sql("update documents set body = 'new body' where doc_id = 'd2'")
    assert [(row["doc_id"], row["body"]) for row in night.prepare().rows()] == [("d2", "new body")]
    night.sql("update queries set query_text = 'new query' where query_id = 'q2'")
    assert errors(night.prepare()).keys() == {("d2", "q1"), ("d1", "q2")}
    night.sql("update documents set body = 'body 2' where doc_id = 'd2'")
    assert errors(night.prepare()).keys() == {("d1", "q2")}, "the old content has its old answer"
    night.sql("delete from snippet_requests where doc_id = 'd1'")
    assert night.prepare().read.num_selected == 0


def test_another_model_workload_or_full_reads_everything(night: Any) -> None:
    run = night.run()
    assert night.prepare(model_digest="model-2").read.num_selected == 3
    assert night.prepare(full=True).read.num_selected == 3
    longer = replace(run.workload, kind=replace(run.workload.kind, decoding=Decoding(max_new_tokens=99)))
    assert night.prepare(longer).read.num_selected == 3
    renamed = replace(run.workload, name="other")
    assert night.prepare(renamed).read.num_selected == 0, "a name changes no answer"


def test_going_back_to_an_earlier_content_reads_it_again(night: Any) -> None:
    night.run()
    night.sql("update documents set body = 'changed' where doc_id = 'd2'")
    night.run()
    night.sql("update documents set body = 'body 2' where doc_id = 'd2'")
    assert errors(night.prepare()).keys() == {("d2", "q1")}, "the newest answer is that to the changed body"


def test_what_failed_in_the_engine_is_tried_again_and_what_cannot_work_is_not(night: Any) -> None:
    def fail_one(row: dict[str, Any]) -> dict[str, Any]:
        failed = {"finish_reason": "error", "error": "out of memory"}
        return failed if row["doc_id"] == "d2" else {"answer": "fine", "finish_reason": "eos"}

    run = night.run(answer=fail_one, too_long=lambda row: row["query_id"] == "q2")
    assert run.rows()[1]["error"] is None, "found by the tokenizer"
    assert night.sql("select doc_id, query_id, finish_reason, error from failed_rows order by all") == [
        ("d1", "q2", "invalid", "prompt too long"),
        ("d2", "q1", "error", "out of memory"),
    ]
    assert errors(night.prepare()).keys() == {("d2", "q1")}


def test_a_repeated_pair_is_answered_twice_then_done(night: Any) -> None:
    night.sql("insert into snippet_requests values ('d1', 'q1')")
    assert night.run().read.num_selected == 4
    assert night.sql("select count(*) from snippets where doc_id = 'd1' and query_id = 'q1'") == [(2,)]
    assert night.sql("select count(*) from latest_snippets") == [(3,)]
    assert night.prepare().read.num_already_done == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("drop table documents", "in the query of workload 'snippets': no table or view 'documents'"),
        (
            "alter table documents drop body",
            "workload 'snippets': table 'documents' has no column 'body'",
        ),
        ("alter table queries rename query_id to id", "table 'queries' has no column 'query_id'"),
        ("alter table snippet_requests drop query_id", "table 'snippet_requests' has no column 'query_id'"),
        ("alter table snippets drop content_key", "table 'snippets' is not batchloom's"),
        ("alter table runs drop config", "table 'runs' has no column 'config'"),
        (
            "drop table runs; create table runs (run_id int, athlete text)",
            "it has athlete, run_id: batchloom keeps its runs in a table of this name: if this one is yours, rename it",
        ),
        (
            "drop table steps; create table steps (id int, what text)",
            "it has id, what: batchloom keeps its steps in a table of this name: if this one is yours, rename it",
        ),
        ("alter table snippets alter doc_id type blob", "'snippets': column 'doc_id' is BLOB, batchloom writes V"),
        ("alter table snippets alter snippet type text[] using [snippet]", "column 'snippet' is VARCHAR[], batchloom"),
        ("alter table snippets alter created_at type timestamp", "is TIMESTAMP, batchloom writes TIMESTAMP WITH TIME"),
        ("alter table runs alter num_ok type text", "'runs': column 'num_ok' is VARCHAR, batchloom writes B"),
        ("alter table steps alter step type text", "'steps': column 'step' is VARCHAR, batchloom writes B"),
        ("drop view failed_rows; create table failed_rows (a int)", "'failed_rows' is a table; batchloom needs a view"),
        ("create view run_summary as select 1 as run_id", "has not made the view 'run_summary' and would replace it"),
        ("create view latest_snippets as from snippets_of_mine", "has not made the view 'latest_snippets' and would"),
        ("create view Ranked_Documents as from snippets_of_mine", "has not made the view 'ranked_documents' and"),
        ("create view failed_rows as select 1 as a", "has not made the view 'failed_rows' and would replace it"),
        ("alter table snippets rename to s; create view snippets as from s", "'snippets' is a view; batchloom needs"),
    ],
)
def test_what_the_database_lacks_is_named_before_any_work(night: Any, change: str, message: str) -> None:
    views = ("failed_rows", "latest_snippets", "ranked_documents", "latest_rankings", "run_summary")
    if not change.startswith("drop view"):
        for view in views:
            night.sql(f"drop view {view}")
    night.sql("create table snippets_of_mine as select 'd1' as doc_id, 'my own' as snippet")
    night.sql(change)
    with pytest.raises(DatabaseError) as caught:
        night.prepare()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(night.path) in str(caught.value)


def test_inputs_may_be_views_and_outputs_may_not_be_there_yet(tmp_path: Path, night: Any) -> None:
    other = type(night)(tmp_path / "own.duckdb")
    other.sql("create table texts as select 'd' as id, 'text' as content")
    other.sql("create view documents as select id as doc_id, null::text as title, content as body from texts")
    other.sql("create table queries as select 'q' as query_id, 'why?' as query_text")
    other.sql("create view snippet_requests as select doc_id, query_id from documents, queries")
    run = other.run()
    assert run.read.num_selected == 1
    assert other.sql("select snippet from latest_snippets") == [("text / why?",)]
    assert other.sql("select content from texts") == [("text",)]
    assert other.prepare().read.num_already_done == 1


def test_a_million_bytes_and_more_rows_than_a_batch(night: Any) -> None:
    night.sql("update documents set body = repeat('x', 1000000) where doc_id = 'd2'")
    night.sql("insert into queries select 'r' || i, 'query' from range(3000) t(i)")
    night.sql("insert into snippet_requests select 'd1', 'r' || i from range(3000) t(i)")
    rows = night.prepare().rows()
    assert [row["row_id"] for row in rows] == list(range(3003))
    assert len(rows[-1]["body"]) == 1_000_000


def test_long_texts_are_fetched_a_few_at_a_time(night: Any) -> None:
    night.sql("update documents set body = repeat('x', 5000000) where doc_id = 'd1'")
    night.sql("insert into queries select 'r' || i, 'query' from range(8) t(i)")
    night.sql("insert into snippet_requests select 'd1', 'r' || i from range(8) t(i)")
    run = night.prepare()
    with open_parquet(run.read.requests) as file:
        counts = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
    assert counts == [3, 3, 3, 2], "3 times 5 MB is within 16 MiB"
    assert [len(row["body"]) for row in run.rows()] == [5_000_000] * 10 + [len("body 2")]


def test_keys_that_are_texts_themselves(night: Any) -> None:
    """Rows of one key together, and the same order whatever that of the table; keys that differ early in theirs."""
    keys = [
        *(f"{number:02}" + "k" * 20_000 for number in range(30)),
        *("k" * 20_000 + f"{number}" for number in range(9)),
    ]
    insert = "insert into snippet_requests select unnest(?), unnest(?)"
    night.sql("insert into queries select unnest(?), 'query'", [keys])
    night.sql(insert, [["d2", "d1"] * len(keys), [key for key in keys for _ in range(2)]])
    found = [(row["doc_id"], row["query_id"]) for row in night.prepare().rows()]
    assert [key for document, key in found if document == "d1" and key in keys[:30]] == keys[:30]
    assert sorted(found) == sorted(night.sql("from snippet_requests"))
    rows = night.sql("from snippet_requests")
    night.sql("delete from snippet_requests")
    night.sql(insert, [list(column) for column in zip(*reversed(rows), strict=True)])
    assert [(row["doc_id"], row["query_id"]) for row in night.prepare().rows()] == found


def test_two_reads_while_this_process_has_the_database_open(night: Any) -> None:
    with connect(night.path):
        assert night.prepare().rows() == night.prepare().rows()


def test_answers_are_expected_to_be_as_long_as_those_of_the_newest_runs(night: Any) -> None:
    """Not as those of the same table that another prompt or another workload got, nor as those of long ago."""
    workload = load_workload("snippets")
    assert read_answer_length(night.path, workload) == AnswerLength(num_tokens=48)
    for day, (digest, num_answers, num_tokens) in enumerate(
        [("other", 5000, 40), (workload.digest, 3000, 30), (workload.digest, 900, 20), (workload.digest, 200, 9)]
    ):
        night.sql(
            "insert into runs by name select ? as run_id, 'snippets' as workload, ? as workload_digest, ? as num_ok,"
            " timestamptz '2026-01-01 00:00:00+00' + ? * interval 1 day as started_at",
            [f"r{day}", digest, num_answers, day],
        )
        night.sql(
            "insert into snippets by name select 'ok' as status, ? as run_id, ? as num_output_tokens from range(?)",
            [f"r{day}", num_tokens, num_answers],
        )
        mean = {0: 40, 1: 30, 2: round((3000 * 30 + 900 * 20) / 3900), 3: round((900 * 20 + 200 * 9) / 1100)}[day]
        assert read_answer_length(night.path, workload).num_tokens == mean


def test_an_answer_cut_at_its_limit_counts_as_long_as_it_was_decoded(night: Any) -> None:
    """It is an error row where it must be whole, as JSON must."""
    workload = load_workload("snippets")
    night.sql(
        "insert into snippets by name select status, finish_reason, num_output_tokens"
        " from (values ('ok', 'eos', 10), ('error', 'length', 40), ('error', 'invalid', null))"
        " as answers(status, finish_reason, num_output_tokens)"
    )
    assert read_answer_length(night.path, workload) == AnswerLength(num_tokens=25, num_earlier_answers=2)
