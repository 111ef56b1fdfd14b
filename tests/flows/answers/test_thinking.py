"""A night with a reasoning model: thoughts in a column or away, typed columns behind them, questions without any."""

from pathlib import Path

import pytest

from engine.errors import ModelError
from flows.cli import batchloom
from tests.flows.conftest import Nights

COLUMNS = """
[columns]
house = { type = "UTINYINT", not_null = true }
kind  = { type = "ENUM('tower', 'barn')", not_null = true }
"""
QUESTIONS = '[questions]\ntall = { type = "BOOLEAN", ask = "Is it tall?" }'
BUDGET = "max_thinking_tokens = 20"
WORKLOADS = {
    "kept": ("extract", f'thinking = "keep"\n{BUDGET}', COLUMNS),
    "dropped": ("extract", f'thinking = "drop"\n{BUDGET}', COLUMNS),
    "written": ("generate", f'thinking = "keep"\n{BUDGET}', "[decoding]\nmax_new_tokens = 8"),
    "silent": ("decide", 'thinking = "off"', QUESTIONS),
    "plain": ("decide", "", QUESTIONS),
}


def test_a_night_thinks_before_it_answers(
    prefect_server: str, nights: Nights, thinking_checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "select_documents.sql").write_text("select doc_id, body from documents")
    paths = [tmp_path / f"{name}.toml" for name in WORKLOADS]
    for path, (mode, keys, tables) in zip(paths, WORKLOADS.values(), strict=True):
        answer_column = 'answer_column = "answer"' if mode == "generate" else ""
        path.write_text(
            f'name = "{path.stem}"\nmode = "{mode}"\n{keys}\nrequests_sql = "select_documents.sql"\nkey = ["doc_id"]\n'
            f'[prompt]\ntemplate = "{{body}}"\n{tables}\n[output]\ntable = "{path.stem}"\n{answer_column}\n'
        )
    with pytest.raises(ModelError, match="workload 'kept': the model's tokenizer has no marks around thoughts"):
        nights.run(str(paths[0]))
    assert not list(nights.runs.glob("*/requests.parquet"))
    nights.model = thinking_checkpoint
    summaries = nights.run(*map(str, paths))
    assert [(summary.num_ok, summary.num_errors) for summary in summaries] == [(4, 0)] * 5
    kept = nights.sql("select thinking, kind, house from latest_kept order by doc_id")
    assert all(thinking and "think>" not in thinking for thinking, _, _ in kept)
    assert nights.sql("select distinct typeof(kind), typeof(house) from kept") == [
        ("ENUM('tower', 'barn')", "UTINYINT")
    ]
    assert [row[1:] for row in kept] == nights.sql("select kind, house from latest_dropped order by doc_id")
    assert nights.sql("select count(*) from kept where num_output_tokens <= 20") == [(0,)]
    assert ("thinking",) not in nights.sql("select name from pragma_table_info('dropped')")
    for thinking, answer in nights.sql("select thinking, answer from latest_written"):
        assert thinking
        assert "think>" not in thinking + answer
    asked = "select tall_probability, num_prompt_tokens from latest_{} order by doc_id"
    for (silent, more_tokens), (plain, num_tokens) in zip(
        nights.sql(asked.format("silent")), nights.sql(asked.format("plain")), strict=True
    ):
        assert more_tokens > num_tokens + 2
        assert silent != plain
    dropped = paths[list(WORKLOADS).index("dropped")]
    dropped.write_text(dropped.read_text().replace('"drop"', '"keep"'))
    (again,) = nights.run(str(dropped))
    assert (again.num_ok, again.num_already_done) == (4, 0)
    later = nights.sql("select thinking, kind, house from latest_dropped order by doc_id")
    assert later == kept, "the table got the column"


def test_the_check_of_a_night_finds_a_budget_that_no_thought_fits(
    nights: Nights, thinking_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "select_documents.sql").write_text("select doc_id, body from documents")
    (tmp_path / "brief.toml").write_text(
        'name = "brief"\nmode = "generate"\nthinking = "keep"\nmax_thinking_tokens = 1\n'
        'requests_sql = "select_documents.sql"\nkey = ["doc_id"]\n[prompt]\ntemplate = "{body}"\n'
        '[output]\ntable = "brief"\nanswer_column = "answer"\n'
    )
    file = tmp_path / "night.toml"
    models = f'[models.small]\npath = "{thinking_checkpoint}"\n'
    file.write_text(f'database = "{nights.path}"\n{models}[[workload]]\nfile = "brief.toml"\n')
    assert batchloom(["check", str(file)]) == 1
    assert "workload 'brief' with model" in (said := capsys.readouterr().err)
    assert "thoughts of at most 1 tokens are too short" in said
