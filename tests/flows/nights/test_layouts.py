"""`layout = "auto"`: a night puts what rows share first, keeps its choice, and answers nothing again for little."""

import json
import shutil
from pathlib import Path
from typing import Any

import duckdb
import huggingface_hub
import pytest

from flows.cli import batchloom
from flows.nights.night import night
from tests.flows.nights.night_text import night_text

WORKLOAD = """
name = "{name}"
mode = "score"
requests_sql = "about.sql"
key = ["doc_id", "query_id"]
labels = ["yes", "no"]
[prompt]
chat = false
layout = "{layout}"
template = '''
Read carefully.

Task: {task}

Question: {{query_text}}

Document: {{body}}
Answer yes or no:'''
[output]
table = "{name}"
"""

SQL = "select doc_id, query_id, body, query_text from documents cross join queries"

TASKS = {"kind": "say whether the writer is kind", "angry": "decide if this text is full of anger or not"}


@pytest.fixture
def write_night(nights: Any, tiny_llama: Path) -> Any:
    """Write a night of some of the `TASKS`."""

    def write(*names: str, layout: str = "auto") -> Path:
        folder = nights.path.parent
        (folder / "about.sql").write_text(SQL)
        text = night_text({"small": tiny_llama}, max_num_batched_tokens=256)
        for name in names:
            (folder / f"{name}.toml").write_text(WORKLOAD.format(name=name, layout=layout, task=TASKS[name]))
            text += f'[[workload]]\nfile = "{name}.toml"\n'
        (folder / "night.toml").write_text(text)
        return Path(folder / "night.toml")

    return write


def read_kept(nights: Any) -> dict[str, tuple[Any, ...]]:
    rows = nights.sql("select workload, part_order, num_computed_tokens, num_written_tokens from workload_layouts")
    return {workload: rest for workload, *rest in rows}


def test_a_check_shows_prompts_in_the_layout_that_the_night_chooses(
    nights: Any, write_night: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without leaving a choice, or prompts in the cache, to the night."""
    assert batchloom(["check", str(write_night("kind")), "--show", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("\nDocument: The night watchman") < shown.index("\nQuestion: what did he see in house 0?")
    assert not nights.runs.exists()
    with pytest.raises(duckdb.CatalogException):
        read_kept(nights)


def test_a_night_chooses_once_and_keeps_its_choice(nights: Any, write_night: Any, prefect_server: str) -> None:
    (summary,) = night(file=write_night("kind"))
    assert summary.num_ok == 12
    order, num_tokens, num_written = read_kept(nights)["kind"]
    assert order == [0, 2, 1], "the document, which is long, comes before the question; the task is everybody's"
    assert num_tokens < 0.7 * num_written
    assert nights.sql("select num_prompt_tokens - num_cached_tokens from runs") < [(num_tokens + 1,)]
    template = nights.sql("select template from workload_layouts")[0][0]
    assert template.index("{body}") < template.index("{query_text}") < template.index("Answer yes or no:")

    # New rows for which the written order were better by some percent are asked like the others.
    nights.sql("delete from queries where query_id <> 'q0'")
    nights.sql("insert into documents values ('d9', 'House', 'The night watchman is here. ')")
    (summary,) = night(file=write_night("kind"))
    assert (summary.num_ok, summary.num_already_done) == (1, 4)
    assert read_kept(nights)["kind"][0] == [0, 2, 1]
    answers = nights.sql("select doc_id, query_id, label, content_key from latest_kind order by all")

    # A file with the parts in that order has the same content keys: nothing is answered again.
    file = write_night("kind", layout="written")
    source = (nights.path.parent / "kind.toml").read_text()
    first, second = "Question: {query_text}\n\n", "Document: {body}\n"
    moved = source.replace(first + second, "Document: {body}\n\nQuestion: {query_text}\n")
    assert moved != source
    (nights.path.parent / "kind.toml").write_text(moved)
    (summary,) = night(file=file)
    assert (summary.num_rows, summary.num_already_done) == (0, 5)
    assert nights.sql("select doc_id, query_id, label, content_key from latest_kind order by all") == answers


def test_rows_of_one_night_have_orders_of_their_own(nights: Any, write_night: Any, prefect_server: str) -> None:
    """Half of the rows share a document, half a question: no order serves both, and the answers are those of each."""
    file = write_night("kind")
    long = "the night watchman walks around the house and looks at every door "
    nights.sql("create table mixed (doc_id text, query_id text, body text, query_text text)")
    for number in range(4):
        nights.sql(f"insert into mixed values ('d', 'q{number}', '{long * 2}', '{number} {long}')")
        nights.sql(f"insert into mixed values ('d{number}', 'q', '{number} {long}', '{long * 2}')")
    (nights.path.parent / "about.sql").write_text("select doc_id, query_id, body, query_text from mixed")
    (summary,) = night(file=file)
    assert summary.num_ok == 8
    assert nights.sql("select count(*), count(distinct part_order) from workload_row_layouts") == [(4, 1)]
    ((num_tokens, num_written),) = [kept[1:] for kept in read_kept(nights).values()]
    assert num_tokens < 0.8 * num_written
    assert nights.sql("select num_prompt_tokens - num_cached_tokens from runs") < [(num_tokens + 1,)]
    answers = nights.sql("select doc_id, query_id, label, label_logprobs, content_key from latest_kind order by all")
    (summary,) = night(file=file)
    assert (summary.num_rows, summary.num_already_done) == (0, 8)

    # A file that is written in the order of some rows answers these alike.
    (order,) = nights.sql("select distinct part_order from workload_row_layouts")[0]
    source = (nights.path.parent / "kind.toml").read_text()
    parts = ["Task: " + TASKS["kind"], "Question: {query_text}", "Document: {body}"]
    moved = source.replace("\n\n".join(parts), "\n\n".join(parts[int(number)] for number in order.split(",")))
    assert moved != source
    (nights.path.parent / "kind.toml").write_text(moved.replace('layout = "auto"', 'layout = "written"'))
    (summary,) = night(file=file)
    assert (summary.num_ok, summary.num_already_done) == (4, 4)
    again = nights.sql("select doc_id, query_id, label, label_logprobs, content_key from latest_kind order by all")
    assert len(set(map(str, answers)) & set(map(str, again))) == 4


def test_workloads_of_one_night_are_laid_out_for_each_other(
    nights: Any, write_night: Any, prefect_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_night("kind", "angry")
    assert batchloom(["advise", str(file), "--json"]) == 0
    (advice,) = json.loads(capsys.readouterr().out)
    written, best, each = (cost for cost in advice["costs"])
    assert (written["name"], best["name"], each["name"]) == ("as written", "one order", "order per row")
    assert best["num_computed_tokens"] < 0.7 * written["num_computed_tokens"]
    assert all(order.startswith("Document") for order in best["orders"]), "before the tasks, which differ"
    assert not nights.sql("from duckdb_tables() where table_name = 'workload_layouts'"), "advice writes nothing"

    summaries = night(file=file)
    assert [summary.num_ok for summary in summaries] == [12, 12]
    kept = read_kept(nights)
    assert {order[0] for order, _, _ in kept.values()} == {2}
    assert {num_tokens for _, num_tokens, _ in kept.values()} == {best["num_computed_tokens"]}
    assert batchloom(["advise", str(file)]) == 0
    assert "as written" in capsys.readouterr().out


def test_advice_counts_what_a_night_plans_together(
    nights: Any, write_night: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_night("kind", "angry")
    copy = shutil.copytree(nights.model, tmp_path / "large")
    alone = file.read_text() + f'[machines]\nexchange = "{tmp_path.as_uri()}"\n'
    cascade = file.read_text().replace('"kind.toml"', '"kind.toml"\ncascade = { to = "large", below = 0.9 }')
    cascade = cascade.replace("[[workload]]", f'[models.large]\npath = "{copy}"\n[[workload]]', 1)
    cascade = cascade.replace('.toml"\n', '.toml"\nmodel = "small"\n')
    for text, batches in ((alone, [["kind"], ["angry"]]), (cascade, [["kind", "angry"], ["kind-large"]])):
        file.write_text(text)
        assert batchloom(["advise", str(file), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [advice["workloads"] for advice in found] == batches
    fixed = [sentence for advice in found for sentence in advice["sentences"] if "both models of a cascade" in sentence]
    assert [sentence.split(":")[0] for sentence in fixed] == ["kind", "kind-large"]


def test_advice_on_one_workload(nights: Any, write_night: Any, capsys: pytest.CaptureFixture[str]) -> None:
    write_night("kind", layout="written")
    nights.sql("insert into documents select 'twin', title, body from documents where doc_id = 'd0'")
    file = nights.path.parent / "kind.toml"
    arguments = ["advise", str(file), *nights.inputs]
    assert batchloom([*arguments, "--json"]) == 0
    (advice,) = json.loads(capsys.readouterr().out)
    (summary,) = nights.run(str(file), partition_tokens=10**6)
    assert (advice["num_rows"], advice["num_prompt_tokens"]) == (summary.num_rows, summary.num_prompt_tokens)
    assert advice["costs"][0]["num_computed_tokens"] == summary.num_prompt_tokens - summary.num_cached_tokens
    costs = {cost["name"]: cost["num_computed_tokens"] for cost in advice["costs"]}
    assert costs["one order"] == min(costs.values()) < costs["as written"] < advice["num_prompt_tokens"]
    assert any('layout = "auto"' in sentence for sentence in advice["sentences"])
    assert batchloom(["advise", "snippets", *nights.inputs]) == 0
    assert "its layout is right as it is" in capsys.readouterr().out
    assert batchloom(["advise", str(nights.path.parent / "kind.toml")]) == 1
    assert "needs --database and --model" in capsys.readouterr().err


def test_advice_sees_parts_that_begin_alike(nights: Any, write_night: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A night's choice compares whole parts, the advice tokens."""
    write_night("kind", layout="written")
    letterhead = "the night watchman walks around the house and looks at every door " * 2
    nights.sql("create table letters (doc_id text, query_id text, body text, query_text text)")
    for number in range(8):
        nights.sql(f"insert into letters values ('d', '{number}', '{letterhead} {number}', '{number} of the letters')")
    (nights.path.parent / "about.sql").write_text("select doc_id, query_id, body, query_text from letters")
    assert batchloom(["advise", str(nights.path.parent / "kind.toml"), *nights.inputs, "--json"]) == 0
    (advice,) = json.loads(capsys.readouterr().out)
    cheapest = min(advice["costs"], key=lambda cost: cost["num_computed_tokens"])
    assert cheapest["name"] not in ("as written", "one order")
    (sentence,) = advice["sentences"]
    assert f"kind: write its template in the order {cheapest['orders'][0]}: its parts begin alike" in sentence


def test_advice_fetches_no_weights(nights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def download(model: str, revision: str | None, allow_patterns: list[str]) -> str:
        assert (model, revision) == ("me/tiny", None)
        asked.extend(allow_patterns)
        return str(nights.model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert batchloom(["advise", "snippets", "--database", str(nights.path), "--model", "me/tiny"]) == 0
    assert "config.json" in asked
    assert "*.safetensors" not in asked


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('database = "team.duckdb"\n[models.small\n', "line 2"),
        ('database = "team.duckdb"\n[[workload]]\nfile = "snippets"\n', "models is missing"),
    ],
)
def test_advice_on_a_broken_night_file_says_what_is_broken(
    text: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "night.toml"
    file.write_text(text)
    assert batchloom(["advise", str(file)]) == 1
    error = capsys.readouterr().err
    assert str(file) in error
    assert problem in error
