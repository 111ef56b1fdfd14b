"""The views: the newest answer to each current request, ranks without gaps, failures with reasons."""

from typing import Any

import duckdb

from sql import statement
from tasks.database.connection import connect
from tasks.database.schema import create_schema, list_relations

LATEST = "select doc_id, query_id, snippet from latest_snippets order by all"


def score(row: dict[str, Any]) -> dict[str, Any]:
    """Longer ids score higher."""
    return {"score": 1 - 1 / len(row["doc_id"]) / 2, "finish_reason": "scored"}


def test_the_newest_answer_of_each_pair(night: Any) -> None:
    night.run()
    night.sql("update documents set body = 'new' where doc_id = 'd1'")
    night.run()
    assert night.sql("select count(*) from snippets") == [(5,)]
    assert night.sql(LATEST) == [
        ("d1", "q1", "new / query 1"),
        ("d1", "q2", "new / query 2"),
        ("d2", "q1", "body 2 / query 1"),
    ]


def test_what_is_deleted_leaves_the_views_at_once(night: Any) -> None:
    night.run()
    night.sql("delete from snippet_requests where query_id = 'q2'")
    assert night.sql(LATEST) == [("d1", "q1", "body 1 / query 1"), ("d2", "q1", "body 2 / query 1")]
    night.sql("delete from documents where doc_id = 'd1'")
    assert night.sql(LATEST) == [("d2", "q1", "body 2 / query 1")]
    night.sql("delete from queries")
    assert night.sql(LATEST) == []
    night.run()
    assert night.sql("select workload, doc_id, query_id, error from failed_rows order by all") == [
        ("snippets", "d1", "q1", "doc_id 'd1' is not in documents"),
        ("snippets", "d2", "q1", "query_id 'q1' is not in queries"),
    ]
    night.sql("delete from snippet_requests")
    assert night.sql("from failed_rows") == []
    assert night.sql("select count(*) from snippets") == [(5,)], "the tables keep every answer"


def test_null_keys_are_seen_as_failed(night: Any) -> None:
    night.sql("insert into snippet_requests values (null, 'q1'), (null, null)")
    night.sql("insert into ranking_candidates values (null, 'd1')")
    night.run()
    night.run("ranking", score)
    assert night.sql("select workload, doc_id, query_id, error from failed_rows order by all") == [
        ("ranking", "d1", None, "query_id is NULL"),
        ("snippets", None, "q1", "doc_id is NULL"),
        ("snippets", None, None, "doc_id is NULL"),
    ]


def test_the_ranked_list_closes_its_gaps(night: Any) -> None:
    night.sql("insert into documents values ('long', 'Long', 'text')")
    night.sql("insert into ranking_candidates select query_id, doc_id from queries, documents")
    night.run("ranking", score)
    assert night.sql("select query_text, rank, doc_id, title from ranked_documents where query_id = 'q1'") == [
        ("query 1", 1, "long", "Long"),
        ("query 1", 2, "d1", "One"),
        ("query 1", 3, "d2", None),
    ]
    night.sql("delete from documents where doc_id = 'long'")
    assert night.sql("select query_id, rank, doc_id from ranked_documents") == [
        ("q1", 1, "d1"),
        ("q1", 2, "d2"),
        ("q2", 1, "d1"),
        ("q2", 2, "d2"),
    ]


def test_the_ranked_list_leaves_out_an_id_that_two_documents_or_queries_have(night: Any) -> None:
    """Until the next run makes its rows errors."""
    night.sql("insert into ranking_candidates select query_id, doc_id from queries, documents")
    night.run("ranking", score)
    night.sql("insert into documents values ('d1', 'Again', 'text')")
    night.sql("insert into queries values ('q2', 'again')")
    assert night.sql("select query_id, rank, doc_id from ranked_documents") == [("q1", 2, "d2")]


def test_runs_are_summed_up_newest_first(night: Any) -> None:
    night.run(seconds={"infer": 2.0}, best_token_saving_ratio=0.5)
    night.run("ranking", score)
    assert night.sql(
        "select workload, num_rows, saved_percent, best_saved_percent, tokens_per_second from run_summary"
    ) == [("ranking", 0, None, None, None), ("snippets", 3, 40.0, 50.0, 18.0)]


def test_the_schema_can_be_made_again_and_keeps_what_is_there(night: Any) -> None:
    night.run()
    before = night.sql("from snippets")
    with connect(night.path) as connection:
        create_schema(connection)
        connection.execute(statement("schema/schema"))
        relations = list_relations(connection)
    assert night.sql("from snippets") == before
    assert {name for name, relation in relations.items() if relation.is_view} == {
        "latest_snippets",
        "latest_rankings",
        "ranked_documents",
        "failed_rows",
        "run_summary",
    }


def test_an_older_client_of_the_views_gets_utc(night: Any) -> None:
    night.run()
    with duckdb.connect(str(night.path), read_only=True) as connection:
        connection.execute("set TimeZone = 'Asia/Tokyo'")
        assert connection.execute("select abs(epoch(created_at - now())) < 60 from latest_snippets").fetchall()[0] == (
            True,
        )
