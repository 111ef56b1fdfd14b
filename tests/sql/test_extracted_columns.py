"""Typed columns in the output table: each of its own DuckDB type, and a row that has none says why."""

import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from engine.errors import DatabaseError
from tasks.workloads.workload import load_workload

WORKLOAD = """
name = "invoices"
mode = "extract"
requests_sql = "select_texts.sql"
key = ["doc_id"]
[prompt]
template = "{body}"
[output]
table = "invoices"
"""
COLUMNS = """
[columns]
"the vendor" = "VARCHAR"
total    = "DECIMAL(12,2)"
currency = "ENUM('EUR', 'USD')"
due      = "DATE"
sent     = "TIMESTAMP"
big      = "HUGEINT"
items    = "STRUCT(name VARCHAR, tags VARCHAR[])[]"
"""
ANSWER = (
    '{"the vendor": "x\\"}; drop table invoices; --\\u0000", "total": 12.5, "currency": "EUR", "due": "2024-02-29", '
    '"sent": "2024-02-29T10:00", "big": -170141183460469231731687303715884105728, '
    '"items": [{"name": null, "tags": ["a", "b"]}]}'
)
NOTHING = json.dumps(dict.fromkeys(("the vendor", "total", "currency", "due", "sent", "big", "items")))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "select_texts.sql").write_text("select doc_id, body from documents")
    (tmp_path / "w.toml").write_text(WORKLOAD + COLUMNS)
    return tmp_path / "w.toml"


def test_columns_have_their_own_types(night: Any, path: Path) -> None:
    night.sql("insert into documents values ('d3', 't', 'c'), ('d4', 't', 'd')")
    answers = {
        "d1": {"answer": ANSWER, "finish_reason": "eos"},
        "d2": {"answer": NOTHING, "finish_reason": "stop"},
        "d3": {"error": "the answer is not complete", "finish_reason": "length"},
        "d4": {"answer": '{"total": "twelve"}', "finish_reason": "eos"},
    }
    run = night.prepare(load_workload(path), lambda row: answers[row["doc_id"]])
    assert run.write().num_errors == 2
    types = dict(night.sql("select column_name, column_type from (describe invoices)"))
    assert types["total"] == "DECIMAL(12,2)"
    assert types["currency"] == "ENUM('EUR', 'USD')"
    assert types["big"] == "HUGEINT"
    assert types["items"] == 'STRUCT("name" VARCHAR, tags VARCHAR[])[]'
    columns = '"the vendor", total, currency, due, sent, big, items'
    rows = night.sql(f"select doc_id, {columns}, status, error, finish_reason from latest_invoices order by doc_id")
    assert rows[0] == (
        *("d1", 'x"}; drop table invoices; --\0', Decimal("12.50"), "EUR", datetime.date(2024, 2, 29)),
        *(datetime.datetime(2024, 2, 29, 10), -(2**127), [{"name": None, "tags": ["a", "b"]}], "ok", None, "eos"),
    )
    assert rows[1] == ("d2", *[None] * 7, "ok", None, "stop")
    assert rows[2] == ("d3", *[None] * 7, "error", "the answer is not complete", "length")
    assert rows[3][1:9] == (*[None] * 7, "error")
    assert rows[3][9] == 'the answer cannot be cast to the columns: {"total": "twelve"}'
    assert night.sql("select doc_id from failed_invoices order by all") == [("d3",), ("d4",)]


def test_a_schema_gives_a_json_column(night: Any, path: Path) -> None:
    (path.parent / "shape.json").write_text('{"type": "object", "properties": {"a": {"type": "integer"}}}')
    head = WORKLOAD.replace("[prompt]", 'schema = "shape.json"\n[prompt]')
    path.write_text(head + 'answer_column = "shape"\n')
    night.run(load_workload(path), lambda row: {"answer": '{"a": 7}', "finish_reason": "eos"})
    assert night.sql("select typeof(shape), shape->>'a' from latest_invoices limit 1") == [("JSON", "7")]


def test_text_that_is_no_json_costs_its_row_alone(night: Any, path: Path) -> None:
    (path.parent / "shape.json").write_text('{"type": "object"}')
    path.write_text(WORKLOAD.replace("[prompt]", 'schema = "shape.json"\n[prompt]') + 'answer_column = "shape"\n')
    answers = {"d1": '{"a": 7}', "d2": '{"a": 8}<|im_end|>'}
    run = night.prepare(load_workload(path), lambda row: {"answer": answers[row["doc_id"]], "finish_reason": "eos"})
    assert run.write().num_errors == 1
    rows = night.sql("select doc_id, shape->>'a', status, error from latest_invoices order by doc_id")
    error = 'the answer cannot be cast to the columns: {"a": 8}<|im_end|>'
    assert rows == [("d1", "7", "ok", None), ("d2", None, "error", error)]


def test_the_shipped_one(night: Any) -> None:
    answer = '{"kind": "type", "summary": "It is.", "keywords": ["a"], "has_code": false}'
    night.run(load_workload("facts"), lambda row: {"answer": answer, "finish_reason": "eos"})
    assert night.sql("select distinct kind, summary, keywords, has_code from latest_document_facts") == [
        ("type", "It is.", ["a"], False)
    ]


def test_a_table_with_other_types_is_refused_before_any_work(night: Any, path: Path) -> None:
    night.run(load_workload(path), lambda row: {"answer": NOTHING, "finish_reason": "eos"})
    path.write_text(path.read_text().replace("DECIMAL(12,2)", "BIGINT"))
    with pytest.raises(DatabaseError) as caught:
        night.prepare(load_workload(path))
    assert "table 'invoices': column 'total' is DECIMAL(12,2), batchloom writes BIGINT" in str(caught.value)
