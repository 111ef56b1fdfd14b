"""`nightly --sample`: what is shown, that nothing stays unless it is kept, and that kept answers are the night's."""

import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from engine.errors import ArtifactError
from flows.cli import batchloom
from flows.command.run_flow import run_flow
from flows.nightly import nightly
from flows.quality.sample_page import render_sample, show_value
from flows.text_page import publish_page
from sql import statement
from tasks.forecast.sampled import mean_of, student_95
from tasks.sample import AnsweredRow, Sample, choose_rows, list_answer_lengths
from tasks.storage.artifact import ArtifactRef, write_parquet
from tasks.workloads.workload import load_workload
from tests.flows.test_row_errors import spoiled

ENGINE = ["--dtype", "float32", "--kv-memory", "8MiB", "--max-num-batched-tokens", "128", "--device", "cpu"]


@pytest.mark.usefixtures("prefect_server")
def test_a_stopped_command_says_what_is_kept_and_what_the_next_run_does(
    nights: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    with spoiled(lambda token_ids: KeyboardInterrupt()):
        assert run_flow(nightly, [*nights.inputs, *ENGINE, "--workload", "snippets", "--sample", "2"]) == 130
    assert capfd.readouterr().err.splitlines()[-1] == "nightly: stopped"
    assert not nights.sql("select * from runs")
    with spoiled(lambda token_ids: KeyboardInterrupt()):
        assert run_flow(nightly, [*nights.inputs, *ENGINE, "--workload", "snippets", "--full"]) == 130
    rest = "the next run does the rest (rows answered before only with --full)"
    assert capfd.readouterr().err.splitlines()[-1] == f"nightly: stopped; what is answered is kept, and {rest}"


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_a_sample_is_shown_and_only_kept_answers_are_written(
    nights: Any, add_bad_rows: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    num_bad = len(add_bad_rows(nights))
    options = [*nights.inputs, *ENGINE, "--workload", "snippets", "--sample", "5"]
    assert run_flow(nightly, options) == 0
    printed = capsys.readouterr().out
    assert "snippets: 5 of 12 rows answered as a sample, 0 of them failed" in printed
    assert {"doc_id", "query_id", "snippet"} <= set(printed.split()), "answers have the names of the table's columns"
    assert not nights.sql("select * from runs")
    assert not nights.sql("select * from snippets")
    assert {path.name for path in nights.runs.iterdir()} <= {"cache", "lock"}
    facts = dict(line.strip().split("  ", 1) for line in printed.splitlines() if "  " in line.strip())
    assert facts["prompts"].split()[0] == "12"
    for name in ("time of inference", "output tokens", "tokens of an answer"):
        value, low, high = (float(word.replace(",", "")) for word in facts[name].split() if word != "s")
        assert low <= value <= high, name

    assert run_flow(nightly, [*options, "--keep"]) == 0
    kept = nights.answers()
    assert len(kept) == 5
    shown = capsys.readouterr().out
    words = [str(answer[1]).split()[0] for answer in kept.values() if answer[1]]
    assert all(re.sub(r"[\x00-\x1f\x7f-\x9f]", "", word) in shown for word in words), "control characters apart"
    (summary,) = nights.run("snippets")
    assert (summary.num_already_done, summary.num_rows) == (5, 7 + num_bad)
    after = nights.answers()
    assert {key: after[key] for key in kept} == kept
    nights.run("snippets", full=True)
    whole = nights.answers()
    assert {key: whole[key] for key in kept} == kept, "a row's answer does not depend on the sample it was in"

    copy = str(nights.path.with_name("copy.duckdb"))
    for wrong, message in (
        (["--keep"], "--keep belongs to --sample"),
        (["--sample", "5", "--publish", copy], "a sample that is not kept has nothing to --publish; add --keep"),
    ):
        assert run_flow(nightly, [*nights.inputs, *ENGINE, *wrong]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (0.123456, "0.1235"),
        ("two\nlines [b]", "two lines [b]"),
        ([("billing", 0.975059), ("other", 0.0023)], "billing 0.9751, other 0.0023"),
        ([], "[]"),
        ("x" * 400, f"{'x' * 300}\N{HORIZONTAL ELLIPSIS}"),
    ],
)
def test_a_value_is_shown_in_a_line(value: object, text: str) -> None:
    assert show_value(value) == text


def test_control_characters_of_rows_do_not_reach_the_terminal() -> None:
    """Those that clear the screen, set its title or colour, or turn the direction of text; columns stay aligned."""
    attack = "a\x1b]0;owned\x07\x1b[2J\x9b31m\u202eb\u2066c"
    rows = [
        AnsweredRow(key={"id": key}, answer={"label": attack}, error=None, num_prompt_tokens=3, num_output_tokens=2)
        for key in (attack, "plain")
    ]
    sample = Sample(requests=ArtifactRef(path="", num_rows=2, digest=""), share_degrees=[1, 1], num_all=2)
    page = render_sample(attack, sample, rows, None, 140)
    assert not re.search(r"[^\n\x20-\x7e\u2500-\u257f]", page)
    first, second = page.splitlines()[-2:]
    assert first.index("a]0;owned[2J31mbc", 9) == second.index("a]0;owned[2J31mbc")


def test_no_row_ends_the_code_block_of_its_page(prefect_server: str) -> None:
    @flow(name="fenced", persist_result=False)
    def publish() -> None:
        publish_page("sample", "fenced", "a row\n  ````\n![](http://elsewhere)", "a page")

    publish()
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["sample-fenced"])))
    assert found[0].data == "`````\na row\n  ````\n![](http://elsewhere)\n`````"


def test_what_looks_like_markup_or_an_emoji_is_shown_as_it_is() -> None:
    text = "[b]see[/b] :warning: \\[1]"
    row = AnsweredRow(key={"[k]": text}, answer={"a:ok:": text}, error=None, num_prompt_tokens=3, num_output_tokens=2)
    sample = Sample(requests=ArtifactRef(path="", num_rows=1, digest=""), share_degrees=[1], num_all=1)
    page = render_sample("[w]", sample, [row], None, 140)
    assert page.startswith("[w]: 1 of 1 rows answered as a sample")
    assert re.search(r"\[k\] +a:ok:", page)
    assert page.count(text) == 2


def test_rows_are_not_chosen_from_damaged_requests(tmp_path: Path) -> None:
    batch = pa.record_batch({"row_id": [0], "group_id": [0], "num_prefix_tokens": [0], "token_ids": [[1]]})
    requests, other = (write_parquet(tmp_path / name, batch.schema, [batch]) for name in ("requests", "other"))
    Path(requests.path).write_bytes(b"damaged")
    with pytest.raises(ArtifactError, match="it was changed or damaged"):
        choose_rows.fn(requests, other, other, tmp_path, 1, load_workload("snippets"))


def test_a_sample_holds_each_stratum_in_proportion(tmp_path: Path) -> None:
    """Groups of 1, 4 and 32 prompts, short and long ones: as many of each as their share, within one."""
    degrees = np.repeat([1, 4, 32], [100, 200, 320])
    groups = np.concatenate([np.arange(100), 100 + np.arange(200) // 4, 200 + np.arange(320) // 32])
    lengths = np.random.default_rng(1).integers(10, 500, len(degrees))
    plan = pa.record_batch(
        {"row_id": np.arange(620), "group_id": groups, "num_prefix_tokens": np.where(degrees > 1, 5, 0)}
    )
    tokens = pa.record_batch({"row_id": np.arange(620), "token_ids": [[1] * length for length in lengths.tolist()]})
    files = {
        name: write_parquet(tmp_path / f"{name}.parquet", batch.schema, [batch]).path
        for name, batch in (("requests", plan), ("plan", plan), ("tokens", tokens))
    }

    def choose(num_rows: int, seed: int = 0) -> list[tuple[int, int, int]]:
        with duckdb.connect() as connection:
            parameters = {**files, "num_rows": num_rows, "seed": seed, "num_questions": 1}
            return connection.execute(statement("sample/choose_rows"), parameters).fetchall()

    chosen = choose(62)
    assert choose(62) == chosen != choose(62, seed=1)
    assert len(chosen) == 62
    for row_id, degree, length in chosen:
        assert (degree, length) == (degrees[row_id], lengths[row_id])
    counts = Counter(degree for _, degree, _ in chosen)
    assert all(abs(counts[degree] - number) <= 1 for degree, number in {1: 10, 4: 20, 32: 32}.items())
    quartiles = np.quantile(lengths, (0.25, 0.5, 0.75))
    for degree in counts:
        tiers = np.searchsorted(quartiles, [length for _, of_row, length in chosen if of_row == degree])
        whole = np.bincount(np.searchsorted(quartiles, lengths[degrees == degree]), minlength=4) / 10
        assert np.abs(np.bincount(tiers, minlength=4) - whole).max() <= 1.5
    assert [row_id for row_id, _, _ in choose(1000)] == list(range(620))
    means = [np.mean([length for *_, length in choose(5, seed)]) for seed in range(30)]
    assert 0.8 <= np.mean(means) / lengths.mean() <= 1.1, "few rows are not the longest of each stratum"


def test_rows_of_several_prompts_are_counted_once_as_sharing_a_prefix(tmp_path: Path) -> None:
    """Three questions about each of five rows: the text of the first is its own, those of the others are the same."""
    plan = pa.record_batch(
        {"row_id": np.arange(15), "group_id": np.repeat([0, 1], [3, 12]), "num_prefix_tokens": [5] * 15}
    )
    tokens = pa.record_batch({"row_id": np.arange(15), "token_ids": [[1] * 9] * 15})
    parameters: dict[str, Any] = {
        name: write_parquet(tmp_path / f"{name}.parquet", batch.schema, [batch]).path
        for name, batch in (("requests", plan.slice(0, 5)), ("plan", plan), ("tokens", tokens))
    }
    parameters |= {"num_rows": 5, "seed": 0, "num_questions": 3}
    with duckdb.connect() as connection:
        chosen = connection.execute(statement("sample/choose_rows"), parameters).fetchall()
    assert chosen == [(0, 1, 9), *((row_id, 4, 9) for row_id in range(1, 5))]


def test_the_mean_of_a_sample_has_an_interval_that_holds_the_truth() -> None:
    rng = np.random.default_rng(4)
    population = rng.gamma(2.0, 20.0, 1000)
    found = [mean_of(rng.choice(population, 50, replace=False), 1000, 10**6) for _ in range(400)]
    is_held = [each.low <= population.mean() <= each.high for each in found if each.low and each.high]
    assert len(is_held) == 400
    assert 0.89 <= np.mean(is_held) <= 0.99
    whole = mean_of(population, 1000, 10**6)
    assert whole.low == whole.value == whole.high
    assert mean_of(np.array([7.0, 8.0, 9.0]), 1000, 48).low is None
    assert [student_95(number) for number in (3, 9, 30)] == pytest.approx([3.182, 2.262, 2.042], rel=0.01)
    assert mean_of(np.array([]), 1000, 48).value == 48


@pytest.mark.usefixtures("prefect_server")
def test_a_sample_without_a_row_that_can_be_answered_says_so_in_place_of_a_forecast(
    nights: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    nights.sql("update documents set body = null")
    sampled = partial(run_flow, nightly, [*nights.inputs, *ENGINE, "--workload", "snippets", "--sample", "2"])
    compared = partial(batchloom, ["compare", "snippets", "snippets", *nights.inputs, *ENGINE])
    for command in (sampled, compared):
        assert command() == 0
        printed = capfd.readouterr().out.splitlines()
        reasons = [line for line in printed if "forecast" in line or "predicted" in line]
        assert reasons == ["snippets: no forecast: none of the rows can be answered"]


@pytest.mark.usefixtures("prefect_server")
def test_a_sample_stopped_while_it_is_shown_keeps_its_answers(nights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*given: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("flows.quality.sample.render_sample", stop)
    assert run_flow(nightly, [*nights.inputs, *ENGINE, "--workload", "snippets", "--sample", "2", "--keep"]) == 130
    assert nights.sql("select status, num_ok from runs") == [("interrupted", 2)]


def test_the_lengths_of_answers_include_those_of_cut_ones_but_no_row_that_was_not_answered() -> None:
    rows = [
        AnsweredRow(key={}, answer={}, error=error, num_prompt_tokens=9, num_output_tokens=num_tokens)
        for error, num_tokens in [(None, 5), ("cut at 40 tokens", 40), ("the prompt is too long", 0), (None, 0)]
    ]
    assert list_answer_lengths(rows) == [5, 40, 0]
