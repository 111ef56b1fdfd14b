"""``batchloom check`` of workloads without a night file, and the prompts that it shows."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from flows.cli import batchloom

URGENT = """
name = "urgent"
mode = "decide"
requests_sql = "urgent.sql"
key = ["doc_id"]
[prompt]
chat = {chat}
template = "{{body}} Now: "
[questions]
urgent = {{ type = "BOOLEAN", ask = "Urgent?" }}
topic = {{ type = "ENUM('a', 'b')", ask = "Topic?" }}
[output]
table = "urgent"
"""

NIGHT = """
database = "team.duckdb"
[models.small]
path = "{model}"
[[workload]]
file = "urgent.toml"
[[workload]]
file = "after.toml"
after = "urgent"
"""


@pytest.fixture
def write_workload(nights: Any) -> Any:
    """Write the workload's files beside the database; gives the options of `batchloom check` for it."""

    def write(*, chat: str = "false", sql: str = "select doc_id, body from documents order by doc_id; -- all") -> Any:
        (nights.path.parent / "urgent.toml").write_text(URGENT.format(chat=chat))
        (nights.path.parent / "urgent.sql").write_text(sql)
        return [*nights.inputs, "--workload", str(nights.path.parent / "urgent.toml")]

    return write


def test_a_workload_is_checked_without_a_night_file(
    nights: Any, write_workload: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    options = write_workload()
    assert batchloom(["check", *options]) == 0
    assert capsys.readouterr().out == f"{options[-1]}: nothing is wrong; steps: 1, models: 1\n"
    copy, folder = nights.path.parent / "none" / "copy.duckdb", nights.path.parent
    for wrong, message in (
        (["--publish", str(copy)], f"no folder {copy.parent}"),
        (["--model", str(folder / "none")], f"check: model '{folder / 'none'}': no such file or folder\n"),
        (["--kv-memory", "1KiB"], "check: a KV budget of 1024 bytes holds no request"),
        (["--database", str(folder / "none.duckdb")], "none.duckdb"),
        (["--workload", "urgent"], "no workload 'urgent'"),
        (["--workload", options[-1]], "write to the table 'urgent'"),
        (["--attach", "crm=nowhere"], "attach: crm: nothing is at"),
    ):
        assert batchloom(["check", *options, *wrong]) == 1
        line = capsys.readouterr().err
        assert message in line
        assert line.count("\n") == 1
    assert batchloom(["check", *write_workload(sql="select doc_id, bodi from documents")]) == 1
    assert "check: " in (line := capsys.readouterr().err)
    assert "no column 'bodi'" in line
    assert not nights.runs.exists()


def test_later_workloads_may_read_the_answers_of_earlier_ones(
    nights: Any, write_workload: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    first, later = write_workload(), nights.path.parent / "later.toml"
    later.write_text(URGENT.format(chat="false").replace('"urgent', '"later'))
    later.with_suffix(".sql").write_text("select doc_id, urgent as body from latest_urgent")
    assert batchloom(["check", *first, "--workload", str(later), "--show", "1"]) == 0
    shown = capsys.readouterr().out
    assert "--- urgent, doc_id d0, question urgent: " in shown
    assert "--- later: no prompts before earlier steps have run: " in shown
    assert batchloom(["check", *nights.inputs, "--workload", str(later)]) == 1
    assert "latest_urgent" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--database", "x.duckdb"], ["--model", "x"], ["x.toml", "--device", "cpu"]])
def test_a_check_needs_a_night_file_or_a_database_and_a_model(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert batchloom(["check", *options]) == 2
    line = "only --show goes with a night file" if len(options) == 3 else "NIGHT.toml is missing, or --database and"
    assert capsys.readouterr().err.startswith(f"check: {line}")


def test_prompts_are_shown_as_the_model_gets_them(
    nights: Any, write_workload: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also a row's control sequences, which must not reach the terminal, and rows without a prompt."""
    nights.sql("delete from documents where doc_id > 'd2'")
    nights.sql("update documents set body = null, doc_id = 'd1\x1b[0m' where doc_id = 'd1'")
    body = "it's \x1b[31mred\x9b0m\u202e\r\n\tnow"
    nights.sql("update documents set body = ? where doc_id = 'd0'", [body])
    tokenizer = AutoTokenizer.from_pretrained(nights.model)
    asks = {"urgent": "Urgent?\nAnswer with one of: yes, no.", "topic": "Topic?\nAnswer with one of: a, b."}
    prompts = {name: f"{body} Now: \n\n{ask}" for name, ask in asks.items()}
    assert batchloom(["check", *write_workload(), "--show", "3"]) == 0
    expected = [
        f"--- urgent, doc_id d0, question {name}: {len(tokenizer(prompt).input_ids)} tokens\n{prompt}"
        for name, prompt in prompts.items()
    ]
    expected.append("--- urgent, doc_id d1\x1b[0m: no prompt: body is NULL")
    shown = capsys.readouterr().out.partition("nothing is wrong; steps: 1, models: 1\n\n")[2]
    assert not {"\x1b", "\x9b", "\u202e", "\r"} & set(shown)
    assert shown.encode().decode("unicode_escape") == "\n\n".join(expected) + "\n"

    assert batchloom(["check", *write_workload(chat="true"), "--show", "1"]) == 0
    text = f"<|im_start|>user\n{prompts['urgent']}<|im_end|>\n<|im_start|>assistant\n\n"
    assert capsys.readouterr().out.encode().decode("unicode_escape").endswith(f" tokens\n{text}")


def test_a_night_file_shows_the_prompts_of_its_steps(
    nights: Any, write_workload: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows of the second step are not there yet. Nothing is written."""
    folder, first = nights.path.parent, write_workload()[-1]
    text = Path(first).read_text()
    (folder / "after.toml").write_text(text.replace('"urgent', '"after'))
    (folder / "after.sql").write_text("select doc_id, urgent as body from latest_urgent")
    (folder / "night.toml").write_text(NIGHT.format(model=nights.model))
    assert batchloom(["check", str(folder / "night.toml"), "--show", "2"]) == 0
    first, *shown = capsys.readouterr().out.split("\n--- ")
    assert first.endswith("nothing is wrong; steps: 2, models: 1\n")
    names = ["urgent, doc_id d0, question urgent", "urgent, doc_id d0, question topic", "after"]
    assert [prompt.partition(":")[0] for prompt in shown] == names
    assert "latest_urgent" in shown[-1]
    nights.sql("delete from documents")
    assert batchloom(["check", str(folder / "night.toml"), "--show", "2"]) == 0
    assert "\n--- urgent: no rows\n" in capsys.readouterr().out
    assert not list(nights.runs.glob("*-*"))
    assert nights.sql("select count(*) from information_schema.tables where table_name like '%urgent%'") == [(0,)]
