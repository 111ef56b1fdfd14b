"""The demo's data: enough of it, consistent, and built into a database whole or not at all."""

import ast
import pydoc_data.topics
import tomllib
from pathlib import Path

import pytest

from engine.errors import ConfigError, DatabaseError
from tasks.database.connection import connect
from tasks.database.demo_database import (
    MAX_BODY_CHARS,
    DemoContents,
    build_demo_database,
    read_demo_contents,
    read_reference_topic,
)

DEMO = Path(__file__).parents[3] / "demo"


@pytest.fixture(scope="module")
def contents() -> DemoContents:
    return read_demo_contents()


def test_there_is_as_much_as_the_demo_promises(contents: DemoContents) -> None:
    assert len(contents.documents) >= 30
    assert sum(len(questions) for questions in contents.questions.values()) >= 150
    assert len(contents.searches) >= 20
    assert min(len(names) for names in contents.searches.values()) >= 10


def test_questions_are_different_texts(contents: DemoContents) -> None:
    texts = [text for questions in contents.questions.values() for text in questions] + list(contents.searches)
    assert len(set(texts)) == len(texts)
    assert all(text == text.strip() and text for text in texts)


def test_each_search_has_candidates_that_answer_it_and_others_that_do_not() -> None:
    questions = tomllib.loads((DEMO / "questions.toml").read_text(encoding="utf-8"))
    for search in tomllib.loads((DEMO / "rankings.toml").read_text(encoding="utf-8"))["search"]:
        names = search["relevant"] + search["others"]
        assert search["relevant"], search["text"]
        assert len(search["others"]) >= 9, search["text"]
        assert len(set(names)) == len(names), search["text"]
        assert set(names) <= set(questions), search["text"]


def test_python_proves_what_gold_rows_say(contents: DemoContents) -> None:
    gold = tomllib.loads((DEMO / "gold.toml").read_text(encoding="utf-8"))
    assert {proved["kind"] for proved in gold.values()} == {"statement", "expression", "type"}
    assert contents.kinds.keys() == gold.keys() & contents.documents.keys()
    for name, proved in gold.items():
        (parsed,) = ast.parse(proved["code"]).body
        if proved["kind"] == "type":
            assert isinstance(eval(proved["code"]), type), name
        else:
            assert (proved["kind"] == "expression") == isinstance(parsed, ast.Expr), name


def test_documents_are_whole_paragraphs_of_prose(contents: DemoContents) -> None:
    for topic in contents.documents.values():
        assert 200 <= len(topic.body) <= MAX_BODY_CHARS, topic.name
        assert topic.title, topic.name
        assert "::=" not in topic.body, topic.name
        assert "====" not in topic.body, topic.name
        assert topic.body[-1] not in " \n:,", topic.name
        words = " ".join(pydoc_data.topics.topics[topic.name].replace("-\n", "-").split())
        last = " ".join(topic.body.split("\n\n")[-1].split())
        assert last.rstrip(".") in words, topic.name


def test_a_topic_that_python_lacks_is_none() -> None:
    assert read_reference_topic("no-such-topic") is None


def test_trimming(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """A "thing" statement
*******************

A thing is *made*:

   thing ::= "thing" name

It has a left-
hand side. [1]

New in version 3.2.

Second part
===========

   code stays
       as it is

See also:

  **PEP 1** - not kept

It is defined as follows:

-[ Footnotes ]-

[1] Not kept either.
"""
    monkeypatch.setitem(pydoc_data.topics.topics, "thing", text)
    topic = read_reference_topic("thing")
    assert topic is not None
    assert topic.title == 'A "thing" statement'
    assert topic.body == "A thing is *made*.\n\nIt has a left-hand side.\n\n   code stays\n       as it is"


def test_the_first_paragraph_stays_however_long(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "word " * 1000
    monkeypatch.setitem(pydoc_data.topics.topics, "thing", f"Thing\n*****\n\n{long}\n\nmore\n")
    topic = read_reference_topic("thing")
    assert topic is not None
    assert topic.body == long.strip()


def test_missing_topics_are_left_out_everywhere_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(pydoc_data.topics.topics, "break")
    monkeypatch.delitem(pydoc_data.topics.topics, "yield")
    contents = read_demo_contents()
    assert contents.missing == ("break", "yield")
    assert not {"break", "yield"} & (set(contents.documents) | set(contents.questions))
    assert not any({"break", "yield"} & set(names) for names in contents.searches.values())
    assert len(contents.searches) >= 20


def test_too_few_topics_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.database.demo_database.topics", {"break": "Break\n*****\n\nIt ends a loop.\n"})
    with pytest.raises(ConfigError, match=r"has 1 of the demo's \d+ topics, at least 30"):
        read_demo_contents()


def test_the_database_holds_what_was_read(contents: DemoContents, tmp_path: Path) -> None:
    path = tmp_path / "demo.duckdb"
    build_demo_database(path, contents)
    with connect(path, read_only=True) as connection:
        documents = connection.execute("select doc_id, title, body from documents order by doc_id").fetchall()
        assert documents == sorted((t.name, t.title, t.body) for t in contents.documents.values())
        asked = connection.execute(
            "select doc_id, query_text from snippet_requests join queries using (query_id) order by all"
        ).fetchall()
        assert asked == sorted((name, text) for name, texts in contents.questions.items() for text in texts)
        candidates = connection.execute(
            "select query_text, doc_id from ranking_candidates join queries using (query_id) order by all"
        ).fetchall()
        assert candidates == sorted((text, name) for text, names in contents.searches.items() for name in names)
        assert connection.execute("select count(*) = count(distinct query_id) from queries").fetchone() == (True,)
    assert [file.name for file in tmp_path.iterdir()] == ["demo.duckdb"]


def test_a_database_that_cannot_be_built_leaves_nothing(contents: DemoContents, tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match=r"nowhere/demo\.duckdb cannot be written: no folder .*/nowhere$"):
        build_demo_database(tmp_path / "nowhere" / "demo.duckdb", contents)
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        build_demo_database(tmp_path / "taken", contents)
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]
