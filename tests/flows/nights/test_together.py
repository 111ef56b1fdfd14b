"""Workloads over the same documents, planned as one batch: a document once for all questions, answers as alone."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from engine.errors import FailureRateError, NightError
from engine.planning.plan import SharingStats
from engine.planning.planner import plan_prompts
from flows.nights import together
from flows.nights.night import night
from tasks.runs.infer_job import StopRequest
from tasks.runs.run import Run
from tasks.storage.plan_file import token_arrays
from tests.flows.nights.night_text import night_text
from tests.flows.test_row_errors import spoiled

pytestmark = pytest.mark.usefixtures("prefect_server")

SCORE = """
name = "{name}"
mode = "score"
requests_sql = "about.sql"
key = ["doc_id", "query_id"]
labels = ["yes", "no", "maybe"]
[prompt]
chat = false
template = "{{body}} -- {question} {{query_text}}"
[output]
table = "{name}"
"""

GENERATE = SCORE.replace('mode = "score"', 'mode = "generate"').replace(
    'labels = ["yes", "no", "maybe"]\n', ""
).replace("[output]", "[decoding]\nmax_new_tokens = 5\n[output]\nanswer_column = \"answer\"")  # fmt: skip

DECIDE = (
    SCORE.replace('"score"', '"decide"')
    .replace('labels = ["yes", "no", "maybe"]\n', "")
    .replace(
        "[output]",
        '[questions]\nkind = {{ type = "BOOLEAN", ask = "Is it kind?" }}\n'
        "mood = {{ type = \"ENUM('good', 'bad')\", ask = \"Which mood?\" }}\n[output]",
    )
)

SQL = """
select documents.doc_id, queries.query_id, documents.body, queries.query_text
from documents
cross join queries
"""

ONE_SQL = SQL + "where query_id = 'q0'\n"

QUESTIONS = {
    "urgent": (SCORE, "Urgent: is this for"),
    "summary": (GENERATE, "What is it about for"),
    "angry": (SCORE, "Are they angry about"),
    "moods": (DECIDE, ""),
}


@pytest.fixture
def write_night(nights: Any, tiny_llama: Path) -> Any:
    """Write a night of some of the `QUESTIONS`; each after those that `after` names."""

    def write(*names: str, after: str = "", partition_tokens: int = 100_000, sql: str = SQL) -> Path:
        folder = nights.path.parent
        (folder / "about.sql").write_text(sql)
        text = night_text({"small": tiny_llama}, block_size=1, max_num_batched_tokens=128)
        text += f"[planning]\npartition_tokens = {partition_tokens}\n"
        previous = ""
        for name in names:
            template, question = QUESTIONS[name]
            (folder / f"{name}.toml").write_text(template.format(name=name, question=question))
            text += f'[[workload]]\nfile = "{name}.toml"\n' + (f'after = "{previous}"\n' if after and previous else "")
            previous = name
        (folder / "night.toml").write_text(text)
        return Path(folder / "night.toml")

    return write


def read_answers(nights: Any, *names: str) -> dict[str, list[tuple[Any, ...]]]:
    columns = {"urgent": "label", "angry": "label", "summary": "answer"}
    return {
        name: nights.sql(
            f"select doc_id, query_id, {columns[name]}, status, content_key from latest_{name} order by 1, 2"
        )
        for name in names
    }


def count_computed(nights: Any) -> dict[str, int]:
    """Prompt tokens that went through the model, by run's workload, in the newest run of each."""
    return dict(
        nights.sql(
            "select workload, sum(num_suffix_tokens + num_prefix_tokens) from steps join runs using (run_id)"
            " where run_id in (select arg_max(run_id, started_at) from runs group by workload) group by workload"
        )
    )


def read_joint_prompts(nights: Any) -> list[np.ndarray]:
    """The prompts of the largest tokens file in the cache."""
    files = [pq.read_table(path) for path in nights.runs.glob("cache/tokens-*.parquet")]
    joint = max(files, key=lambda table: table.num_rows)
    return [prompt for chunk in joint.column("token_ids").chunks for prompt in token_arrays(chunk)]


def plan(prompts: list[np.ndarray]) -> SharingStats:
    return plan_prompts(prompts)[1]


def count_different(prompts: list[np.ndarray]) -> int:
    """Beginnings of the prompts, whole ones among them, equal ones once: the fewest tokens that answer them all."""
    return len({prompt[:end].tobytes() for prompt in prompts for end in range(1, len(prompt) + 1)})


def add_houses(nights: Any) -> None:
    """Eight more documents."""
    nights.sql(
        "insert into documents select 'e' || i, 'House', repeat('House ' || i || '. ', 20) from range(8) as x (i)"
    )


def test_three_workloads_are_one_batch(nights: Any, write_night: Any) -> None:
    """Prompts of three levels: the document, the workload's question, the row's query."""
    nights.sql("update documents set body = repeat(body, 4)")
    names = ["urgent", "summary", "angry"]
    together = night(file=write_night(*names))
    assert [(summary.workload, summary.status, summary.num_ok) for summary in together] == [
        (name, "completed", 12) for name in names
    ]
    joint_answers, joint_computed = read_answers(nights, *names), count_computed(nights)
    scores = nights.sql("select score from latest_urgent order by doc_id, query_id")
    prompts = read_joint_prompts(nights)
    assert len(prompts) == 36
    assert set(joint_computed.values()) == {joint_computed["urgent"]}, "each run has the steps of all"
    assert joint_computed["urgent"] == count_different(prompts), "the joint optimum"
    shared = {name: json.loads(found) for name, found in nights.sql("select workload, shared_with from runs")}
    for number, name in enumerate(names):
        for other in range(number + 1, len(names)):
            one, two = prompts[12 * number :][:12], prompts[12 * other :][:12]
            saved = plan(one).num_best_tokens + plan(two).num_best_tokens - plan([*one, *two]).num_best_tokens
            assert shared[name][names[other]] == shared[names[other]][name] == saved
            assert saved > sum(len(body) for (body,) in nights.sql("select body from documents")) / 10
    for summary in together:
        page = (nights.runs / summary.run_id / "report.html").read_text()
        share = f"{summary.num_cached_tokens / summary.num_prompt_tokens:.1%}"
        assert f" {share} of {summary.num_prompt_tokens:,} prompt tokens saved" in summary.text
        assert "at best" not in summary.text + page, "it would be of the prompts of all"
        assert "tokens/s" not in summary.text, "the seconds are those of all"
        assert page.count(share) >= 3, "the figure, the picture and its table"
        assert "-" not in "".join(re.findall(r"(\S+)% saved", page)), "no more is computed than there is"

    of_all = nights.sql("select distinct best_saved_percent, tokens_per_second from run_summary")
    assert of_all == [(None, None)], "they would be of all prompts"

    alone = night(file=write_night(*names, after="each"), full=True)
    assert [summary.num_ok for summary in alone] == [12, 12, 12]
    alone_computed = count_computed(nights)
    assert sum(alone_computed.values()) > 1.5 * joint_computed["urgent"]
    assert read_answers(nights, *names) == joint_answers, "the same float32 answers, content keys and states"
    assert nights.sql("select score from latest_urgent order by doc_id, query_id") == [
        (pytest.approx(score, rel=1e-5),) for (score,) in scores
    ]
    assert nights.sql("select count(*) from runs where shared_with is null") == [(3,)]


def test_what_is_answered_already_is_not_planned_again(nights: Any, write_night: Any) -> None:
    night(file=write_night("urgent"))
    summaries = night(file=write_night("urgent", "summary", partition_tokens=300))
    assert [(summary.num_rows, summary.num_already_done) for summary in summaries] == [(0, 12), (12, 0)]
    nights.sql("insert into queries values ('q9', 'who is it?')")
    summaries = night(file=write_night("moods", "urgent", "summary", partition_tokens=300))
    assert [(summary.num_ok, summary.num_already_done) for summary in summaries] == [(16, 0), (4, 12), (4, 12)]
    for table in ("latest_moods", "latest_urgent", "latest_summary"):
        assert nights.sql(f"select count(distinct (doc_id, query_id)) from {table} where status = 'ok'") == [(16,)]


def test_rows_that_cannot_be_asked_are_not_left(nights: Any, write_night: Any) -> None:
    """A row without text is an error row of each workload; the runs are complete, and the steps after them run."""
    nights.sql("insert into documents values ('e0', 'Empty', null)")
    file = write_night("urgent", "summary", "angry", sql=ONE_SQL)
    file.write_text(file.read_text().replace('"angry.toml"', '"angry.toml"\nafter = ["urgent", "summary"]'))
    summaries = night(file=file)
    assert [(one.workload, one.status, one.num_ok, one.num_errors) for one in summaries] == [
        (name, "completed", 4, 1) for name in ("urgent", "summary", "angry")
    ]
    nights.sql("update documents set body = null")
    summaries = night(file=file)
    assert [(one.status, one.num_ok, one.num_errors) for one in summaries] == [("completed", 0, 4)] * 3
    assert nights.sql("select count(*) from runs where error is not null") == [(0,)]


def test_a_forecast_to_the_deadline_is_in_rows_not_prompts(nights: Any, write_night: Any) -> None:
    """Each row of moods has two prompts."""
    nights.sql("insert into documents values ('e0', 'Empty', null)")
    night(file=write_night("urgent", "moods", sql=ONE_SQL), budget="1h")
    for config, num_rows in nights.sql("select config, num_rows from runs"):
        assert json.loads(config)["prediction"]["num_fitting_rows"] == num_rows == 5


def test_a_deadline_leaves_rows_of_one_batch(
    nights: Any, write_night: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes at a step; the next night does the rest, and each answer is that of a night with time."""
    add_houses(nights)
    names = ["urgent", "summary"]
    night(file=write_night(*names, sql=ONE_SQL))
    assert set(count_computed(nights).values()) == {count_different(read_joint_prompts(nights))}, "the joint optimum"
    undisturbed = read_answers(nights, *names)
    steps = iter(range(8))
    has_time = StopRequest.has_time
    monkeypatch.setattr(
        StopRequest, "has_time", lambda stop, seconds: has_time(stop, seconds if next(steps, None) is not None else 1e9)
    )
    with caplog.at_level("INFO", "batchloom"):
        cut = night(file=write_night(*names, partition_tokens=300, sql=ONE_SQL), full=True, budget="1h")
    monkeypatch.undo()
    assert [(summary.workload, summary.status) for summary in cut] == [(name, "deadline") for name in names]
    num_done, num_left = (
        sum(counts) for counts in zip(*((one.num_ok, one.num_unanswered) for one in cut), strict=True)
    )
    assert num_done + num_left == 24
    assert min(num_done, num_left) > 0
    assert re.search(r"urgent \+ summary: .* s to the deadline.*: [\d,]+ of 24 prompts, .*should fit", caplog.text)
    newest = "select arg_max(config, started_at), arg_max(shared_with, started_at) from runs group by workload"
    for config, shared_with in nights.sql(newest):
        prediction = json.loads(config)["prediction"]
        assert 0 < prediction["num_fitting_rows"] <= 12
        assert len(json.loads(shared_with)) == 1
    rest = night(file=write_night(*names, partition_tokens=300, sql=ONE_SQL))
    assert {summary.status for summary in rest} == {"completed"}
    assert read_answers(nights, *names) == undisturbed
    written = "select count(*) from urgent union all select count(*) from summary"
    assert sum(count for (count,) in nights.sql(written)) == 24 + num_done + sum(summary.num_ok for summary in rest)


def test_a_workload_that_fails_fails_alone(nights: Any, write_night: Any, tmp_path: Path) -> None:
    file = write_night("urgent", "summary")
    bad = (nights.path.parent / "summary.toml").read_text().replace("about.sql", "bad.sql")
    (nights.path.parent / "summary.toml").write_text(bad)
    (nights.path.parent / "bad.sql").write_text(SQL.replace("documents.body", "error('no body')::text as body"))
    with pytest.raises(RuntimeError, match=r"1 of 2 workloads failed: summary: .*no body"):
        night(file=file)
    assert nights.sql("select workload, status, num_ok from runs") == [("urgent", "completed", 12)]


def test_a_workload_with_too_many_invalid_rows_fails_alone(nights: Any, write_night: Any) -> None:
    names = ("urgent", "summary", "angry")
    file = write_night(*names)
    file.write_text(file.read_text() + "[failures]\nmax_invalid_rate = 0.1\nerror_rate_rows = 12\n")
    bad = (nights.path.parent / "summary.toml").read_text().replace("about.sql", "bad.sql")
    (nights.path.parent / "summary.toml").write_text(bad)
    (nights.path.parent / "bad.sql").write_text(SQL.replace("documents.body", "null::text as body"))
    message = r"^1 of 3 workloads failed: summary: 12 of 12 rows are invalid, .* allows 10%: body is NULL \(12 rows\)$"
    with pytest.raises(NightError, match=message):
        night(file=file)
    runs = "select workload, status, num_ok, shared_with ->> '$.urgent' is not null from runs order by workload"
    assert nights.sql(runs) == [("angry", "completed", 12, True), ("urgent", "completed", 12, False)]


def test_answers_that_a_table_cannot_take_wait_for_the_next_night(
    nights: Any, write_night: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of the name of one workload's appears while the night computes."""
    write_rows = together.write_rows

    def write(workload: Any, run: Any) -> Any:
        if workload.name == "summary":
            nights.sql("create table summary (note text)")
        return write_rows(workload, run)

    monkeypatch.setattr(together, "write_rows", write)
    names = ("urgent", "summary", "angry")
    with pytest.raises(NightError, match=r"^1 of 3 workloads failed: summary: .*; the answers stay in .*summary"):
        night(file=write_night(*names))
    monkeypatch.undo()
    assert set(nights.sql("select workload, status, num_ok from runs")) == {
        ("urgent", "completed", 12),
        ("angry", "completed", 12),
    }
    nights.sql("drop table summary")
    summaries = night(file=write_night(*names))
    assert [(summary.num_rows, summary.num_already_done) for summary in summaries] == [(0, 12)] * 3
    assert nights.sql("select count(*), count(distinct run_id) from summary") == [(12, 1)]
    assert nights.sql("select workload, status, num_ok from runs where workload = 'summary' and num_ok > 0") == [
        ("summary", "completed", 12)
    ]


def test_the_only_workload_with_new_rows_fails_once(nights: Any, write_night: Any) -> None:
    night(file=write_night("urgent"))
    file = write_night("urgent", "summary")
    file.write_text(
        file.read_text() + "[failures]\nretry_delay_seconds = 0\nmax_error_rate = 0.1\nerror_rate_rows = 12\n"
    )
    message = (
        r"^1 of 2 workloads failed: summary: .* rows failed, max_error_rate allows 10%: RuntimeError: no step works"
    )
    with spoiled(lambda token_ids: RuntimeError("no step works")), pytest.raises(NightError, match=message):
        night(file=file)
    runs = "select workload, status, num_already_done from runs order by started_at"
    assert nights.sql(runs) == [("urgent", "completed", 0), ("urgent", "completed", 12), ("summary", "failed", 0)]


@pytest.mark.parametrize(
    ("stage", "error"), [("count_left", FailureRateError("too many")), ("infer_together", KeyboardInterrupt())]
)
def test_all_runs_of_a_batch_end_although_one_cannot_be_stopped(
    nights: Any, write_night: Any, monkeypatch: pytest.MonkeyPatch, stage: str, error: BaseException
) -> None:
    stop_run, stopped = together.stop_run, list[Any]()

    def fail(*given: Any) -> None:
        raise error

    def stop(run: Any, workload: Any, error: BaseException) -> None:
        stopped.append(run)
        if len(stopped) == 1:
            raise KeyboardInterrupt
        stop_run(run, workload, error)

    monkeypatch.setattr(together, stage, fail)
    monkeypatch.setattr(together, "stop_run", stop)
    with pytest.raises(KeyboardInterrupt):
        night(file=write_night("urgent", "summary", "angry"))
    runs = [Run.load(nights.path, path.parent) for path in nights.runs.glob("*/manifest.json")]
    left = [run for run in runs if run.record.run_id != stopped[0].record.run_id]
    assert [run.record.status for run in left] == ["failed" if isinstance(error, Exception) else "interrupted"] * 2
