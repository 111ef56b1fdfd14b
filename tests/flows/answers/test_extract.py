"""A night that extracts typed columns with a real model, engine and database, one row's answer cut."""

from pathlib import Path
from typing import Any

import pytest

from tasks.runs.infer_job import FailurePolicy
from tests.flows.conftest import Nights

WORKLOAD = """
name = "sightings"
mode = "extract"
requests_sql = "select_documents.sql"
key = ["doc_id"]
[columns]
house = { type = "UTINYINT", ask = "the number of the house", not_null = true }
kind  = { type = "ENUM('tower', 'barn')", not_null = true }
seen  = "DATE"
words = { type = "VARCHAR[]", max_items = 2, max_chars = 6 }
[prompt]
template = "{body}"
[decoding]
max_new_tokens = 200
[output]
table = "sightings"
"""


def test_a_night_extracts_columns(prefect_server: str, nights: Nights, tmp_path: Any) -> None:
    (tmp_path / "select_documents.sql").write_text("select doc_id, body from documents")
    path = tmp_path / "sightings.toml"
    path.write_text(WORKLOAD)
    (summary,) = nights.run(str(path))
    assert (summary.num_ok, summary.num_errors) == (4, 0)
    rows = nights.sql("select typeof(house), typeof(kind), house, kind, seen, words from latest_sightings")
    assert len(rows) == 4
    for house_type, kind_type, house, kind, _, words in rows:
        assert (house_type, kind_type) == ("UTINYINT", "ENUM('tower', 'barn')")
        assert 0 <= house <= 255
        assert kind in ("tower", "barn")
        assert words is None or (len(words) <= 2 and all(len(word) <= 6 for word in words))
    assert nights.run(str(path))[0].num_already_done == 4
    path.write_text(WORKLOAD.replace("words = ", "Notes = "))
    (summary,) = nights.run(str(path))
    assert (summary.num_ok, summary.num_already_done) == (4, 0)
    newest = nights.sql("select words is null, coalesce(len(notes), 0) <= 2 from latest_sightings")
    assert newest == [(True, True)] * 4, "the table got the new column and kept the old one"
    path.write_text(WORKLOAD.replace("max_new_tokens = 200", "max_new_tokens = 9"))
    (summary,) = nights.run(str(path))
    assert (summary.num_ok, summary.num_errors) == (0, 4)
    assert nights.sql("select distinct error, finish_reason from failed_sightings") == [
        ("the answer is not complete after max_new_tokens = 9 tokens", "length")
    ]
    generated = WORKLOAD.replace('"extract"', '"generate"').replace("[output]", 'pattern = "seen: (yes|no)"\n[output]')
    columns = generated[generated.index("[columns]") : generated.index("[prompt]")]
    path.write_text(generated.replace(columns, "").replace('"sightings"', '"seen"') + 'answer_column = "seen"\n')
    assert nights.run(str(path))[0].num_ok == 4
    assert {text for (text,) in nights.sql("select seen from latest_seen")} <= {"seen: yes", "seen: no"}


@pytest.mark.parametrize("thinking", ["", 'thinking = "keep"\nmax_thinking_tokens = 20\n'])
def test_a_cut_answer_is_settled_and_fails_no_night(
    prefect_server: str, nights: Nights, thinking_checkpoint: Path, tmp_path: Path, thinking: str
) -> None:
    """Asked again, the row would get the same cut answer; a change of the settings, or `full`, asks it again."""
    if thinking:
        nights.model = thinking_checkpoint
    (tmp_path / "select_documents.sql").write_text("select doc_id, body from documents")
    path = tmp_path / "sightings.toml"
    cut = thinking + WORKLOAD.replace("max_new_tokens = 200", "max_new_tokens = 9")
    path.write_text(cut)
    strict = FailurePolicy(max_error_rate=0, error_rate_rows=1)
    (summary,) = nights.run(str(path), failures=strict)
    assert (summary.status, summary.num_ok, summary.num_errors) == ("completed", 0, 4)
    (summary,) = nights.run(str(path), failures=strict)
    assert (summary.num_rows, summary.num_already_done) == (0, 4)
    assert nights.sql("select count(*), min(finish_reason) from failed_sightings") == [(4, "length")]
    assert nights.sql("select count(*) from sightings") == [(4,)]
    assert nights.run(str(path), full=True, failures=strict)[0].num_errors == 4
    path.write_text(cut.replace("max_new_tokens = 9", "max_new_tokens = 8"))
    assert nights.run(str(path), failures=strict)[0].num_errors == 4
