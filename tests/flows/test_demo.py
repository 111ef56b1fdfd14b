"""The demo, with a tiny model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.command.run_flow import run_flow
from flows.demo import demo
from sql import statement
from tasks.database.connection import connect


@pytest.mark.slow
@pytest.mark.usefixtures("minilm", "prefect_server")
def test_the_demo_answers_once_and_then_finds_nothing_new(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """First in a process with a server of its own, as `make demo` runs it."""
    options = ["--model", str(tiny_llama)]
    first = subprocess.run(
        [sys.executable, "-m", "flows.demo", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert first.returncode == 0, first.stderr
    assert "Built demo.duckdb: 37 documents" in first.stdout
    for title in (
        "A few answers",
        "A few searches",
        "What documents are",
        "What sharing saved",
        "Documents nearest in meaning",
        "Look around with SQL",
    ):
        assert title in first.stdout
    assert "Traceback" not in first.stderr
    for gold in ("gold_facets", "gold_facts"):
        assert f"newest answers against gold table {gold}" in first.stdout
    with connect(tmp_path / "demo.duckdb", read_only=True) as connection:
        asked = connection.execute("select count(*) from snippet_requests").fetchone()
        statuses = connection.execute("select count(*), count_if(status = 'ok') > 0 from latest_snippets").fetchone()
        errors = connection.execute("select distinct finish_reason from failed_rows").fetchall()
        ranked = connection.execute("select count(*) from latest_rankings").fetchone()
        near = connection.execute(statement("demo/near_documents"), {"num_rows": 10}).fetchall()
    assert asked is not None
    assert statuses == (*asked, True)
    assert errors in ([], [("invalid",)])  # the tiny model's context is too short for the longest documents
    assert ranked == (264,)
    found = {row[:2] for row in near}  # in an order that depends on the texts of this version of Python
    assert {
        ("With Statement Context Managers", 'The "with" statement'),
        ('The "break" statement', 'The "while" statement'),
    } <= found

    monkeypatch.chdir(tmp_path)
    assert run_flow(demo, options) == 0
    second = capfd.readouterr().out
    assert second.count("nothing new to do") == 5  # answers of the tiny model that were cut are settled, too


def test_a_model_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_flow(demo, ["--model", str(tmp_path / "none.gguf")]) != 0
    (line,) = capfd.readouterr().err.splitlines()
    assert "none.gguf" in line
