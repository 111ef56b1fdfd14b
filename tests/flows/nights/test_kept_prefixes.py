"""`keep_prefixes`: a second night asks new questions about old documents, and computes the questions."""

import logging
import re
import stat
from typing import Any

import pytest

from engine.keeping import prefix_keeper
from flows.settings import EngineSettings

WORKLOAD = """
name = "{name}"
mode = "{mode}"
requests_sql = "about.sql"
key = ["doc_id", "query_id"]
{labels}
[prompt]
chat = false
template = "Document: {{body}}\\n\\n{ask} {{query_text}}"
[output]
table = "{name}"
{answer_column}
"""


@pytest.fixture
def write_workload(nights: Any) -> Any:
    """Write a workload over all documents and queries; gives its path."""

    def write(name: str, ask: str, *, is_scored: bool) -> str:
        folder = nights.path.parent
        (folder / "about.sql").write_text(
            "select doc_id, query_id, body, query_text from documents cross join queries where doc_id <> 'none'"
        )
        labels, answer_column = ('labels = ["yes", "no"]', "") if is_scored else ("", 'answer_column = "answer"')
        mode = "score" if is_scored else "generate"
        text = WORKLOAD.format(name=name, mode=mode, labels=labels, answer_column=answer_column, ask=ask)
        (folder / f"{name}.toml").write_text(text.replace("[output]", "[decoding]\nmax_new_tokens = 5\n[output]") if
                                             not is_scored else text)  # fmt: skip
        return str(folder / f"{name}.toml")

    return write


def test_documents_come_back(
    nights: Any,
    write_workload: Any,
    prefect_server: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(prefix_keeper, "SECONDS_PER_FILE", -1.0)  # a tiny model computes faster than files are opened
    plain = EngineSettings(dtype="float32", kv_memory="8MiB", max_num_batched_tokens=128)
    keeping = plain.model_copy(update={"keep_prefixes": "1GB"})
    first, second = (
        write_workload("kind", "Is it kind?", is_scored=True),
        write_workload("summary", "Say what", is_scored=False),
    )
    nights.run(first, engine=keeping)
    folder = nights.runs / "prefixes"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    kept = list(folder.glob("*.kv"))
    assert len(kept) >= 4, "a file a document"
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}

    (summary,) = nights.run(second, engine=keeping)
    assert re.search(r"tokens saved \(at best [\d.]+% for all rows anew\)", summary.text), summary.text
    page = (nights.runs / summary.run_id / "report.html").read_text()
    assert "% for all rows anew" in page
    computed = (
        "select sum(num_prefix_tokens + num_suffix_tokens) from steps"
        " where run_id = (select arg_max(run_id, started_at) from runs where workload = 'summary')"
    )
    answers = "select doc_id, query_id, answer from latest_summary order by all"
    with_kept, answers_with = nights.sql(computed)[0][0], nights.sql(answers)
    cached = nights.sql("select num_prompt_tokens - num_cached_tokens from runs where workload = 'summary'")[0][0]
    assert with_kept == cached, "what is read from disk counts as cached"
    kept[0].write_bytes(kept[0].read_bytes()[:-5])
    with caplog.at_level(logging.WARNING):
        nights.run(second, engine=keeping, full=True)
    assert nights.sql(answers) == answers_with
    assert sum("is computed again" in record.getMessage() for record in caplog.records) == 1

    nights.run(second, engine=plain, full=True)
    assert nights.sql(answers) == answers_with, "the same float32 answers"
    assert with_kept < 0.6 * nights.sql(computed)[0][0]
