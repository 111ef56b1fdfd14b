"""Nights from a file: checked before any work, step after step, a failure alone, gone on with after a kill."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from prefect import get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.sorting import FlowRunSort

from engine.errors import ConfigError, NightError
from flows import foresight, prediction
from flows.cli import batchloom
from flows.command.run_flow import run_flow
from flows.nights.night import night
from flows.nights.night_file import load_night
from tasks.nights.pace import Pace
from tasks.runs.infer_job import StopRequest

NIGHT = """
database = "team.duckdb"

[models.small]
path = "{model}"
dtype = "float32"
kv_memory = "8MiB"
max_num_batched_tokens = 128

[planning]
partition_tokens = {partition_tokens}

[[workload]]
file = "replies.toml"
after = "{after}"

[[workload]]
file = "snippets"
"""

REPLIES = """
name = "replies"
mode = "generate"
requests_sql = "replies.sql"
key = ["doc_id", "query_id"]
[prompt]
chat = false
template = "Say it again: {snippet}"
may_be_empty = ["snippet"]
[decoding]
max_new_tokens = 4
[output]
table = "replies"
answer_column = "reply"
"""


@pytest.fixture
def write_night(nights: Any, tiny_llama: Path) -> Any:
    """Write the night's files beside its database; gives the night file."""

    def write(*, sql: str = "select doc_id, query_id, snippet from latest_snippets", **changes: Any) -> Path:
        folder = nights.path.parent
        values = {"model": tiny_llama, "partition_tokens": 1500, "after": "snippets"} | changes
        (folder / "replies.toml").write_text(changes.get("replies", REPLIES))
        (folder / "replies.sql").write_text(sql)
        (folder / "night.toml").write_text(changes.get("night", NIGHT).format(**values) + changes.get("more", ""))
        return Path(folder / "night.toml")

    return write


def list_stages() -> dict[str, set[str]]:
    """What Prefect shows of the newest night: the flow runs within its own, each with its tasks."""
    with get_client(sync_client=True) as client:
        whole, *_ = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(name={"any_": ["night-night"]}), sort=FlowRunSort.START_TIME_DESC
        )
        steps = client.read_flow_runs(flow_run_filter=FlowRunFilter(parent_flow_run_id={"any_": [whole.id]}))
        tasks = {
            step.name: client.read_task_runs(flow_run_filter=FlowRunFilter(id={"any_": [step.id]})) for step in steps
        }
    return {name: {re.sub(r"-\w{1,3}$", "", run.name) for run in runs} for name, runs in tasks.items()}


def test_a_step_reads_what_an_earlier_one_wrote(nights: Any, write_night: Any, prefect_server: str) -> None:
    summaries = night(file=write_night())
    assert [(summary.workload, summary.num_ok) for summary in summaries] == [("snippets", 12), ("replies", 12)]
    assert nights.sql("select count(*) from latest_replies where status = 'ok'") == [(12,)]
    expected = {
        name: {f"read-{name}", f"tokenize-{name}", "plan_prefix", "infer", f"write-{name}", "report"}
        for name in ("snippets", "replies")
    }
    deadline = time.monotonic() + 60
    while (found := list_stages()) != expected and time.monotonic() < deadline:
        time.sleep(0.5)  # the server writes states of task runs every five seconds
    assert found == expected
    again = night(file=nights.path.parent / "night.toml")
    assert [(summary.num_rows, summary.num_already_done) for summary in again] == [(0, 12), (0, 12)]


def test_a_failed_step_fails_its_successors_alone(nights: Any, write_night: Any, prefect_server: str) -> None:
    """The query of one step ends in an error when its rows are read, which no check can know before."""
    more = """
[[workload]]
file = "late.toml"
after = ["replies"]
[[workload]]
file = "ranking"
"""
    folder = nights.path.parent
    (folder / "late.toml").write_text(REPLIES.replace('"replies"', '"late"').replace('"replies.sql"', '"late.sql"'))
    (folder / "late.sql").write_text("select doc_id, query_id, reply as snippet from latest_replies")
    sql = "select doc_id, query_id, error('no snippets') as snippet from latest_snippets"
    with pytest.raises(NightError, match=r"1 of 4 workloads failed: replies: .*no snippets.*not begun.*: late"):
        night(file=write_night(sql=sql, more=more))
    assert nights.sql("select workload, num_ok from runs order by workload") == [("ranking", 6), ("snippets", 12)]


@pytest.mark.slow
def test_a_night_with_a_failed_step_prints_how_each_ended_as_json(
    nights: Any, write_night: Any, prefect_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = '[[workload]]\nfile = "late.toml"\nafter = ["replies"]\n'
    folder = nights.path.parent
    (folder / "late.toml").write_text(REPLIES.replace('"replies"', '"late"').replace('"replies.sql"', '"late.sql"'))
    (folder / "late.sql").write_text("select doc_id, query_id, reply as snippet from latest_replies")
    file = write_night(sql="select doc_id, query_id, error('no snippets') as snippet from latest_snippets", more=more)
    assert run_flow(night, [str(file), "--json"]) == 1
    shown = capsys.readouterr()
    done, failed, skipped = json.loads(shown.out)
    assert (done["workload"], done["status"], done["num_ok"], done["error"]) == ("snippets", "completed", 12, None)
    assert (failed["workload"], failed["status"]) == ("replies", "failed")
    assert "no snippets" in failed["error"]
    assert skipped == {"workload": "late", "status": "skipped", "error": None}
    assert shown.err.splitlines()[-1].startswith("nightly: 1 of 3 workloads failed: replies: ")


def test_a_night_shows_a_sample_of_each_step_whose_rows_are_there(
    nights: Any, write_night: Any, prefect_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the file says of its end and of readers; a step that fails fails alone."""
    top, more = 'publish = "copy.duckdb"\nuntil = 2020-01-01T00:00:00\n', '[[workload]]\nfile = "ranking"\n'
    file = write_night(night=top + NIGHT, more=more)
    assert run_flow(night, [str(file), "--sample", "3"]) == 0
    shown = capsys.readouterr().out
    assert "no sample of steps whose rows depend on others: replies\n" in shown
    assert "snippets: 3 of 12 rows answered as a sample, 0 of them failed" in shown
    assert "ranking: 3 of 6 rows answered as a sample, 0 of them failed" in shown
    assert shown.count("All rows, with 95% intervals") == 2

    sql = "select doc_id, query_id, error('no snippets') as snippet from snippet_requests"
    assert run_flow(night, [str(write_night(night=NIGHT.replace("after =", "# "), sql=sql)), "--sample", "3"]) == 1
    shown, failure = capsys.readouterr()
    assert "snippets: 3 of 12 rows answered as a sample, 0 of them failed" in shown
    assert failure.startswith("nightly: 1 of 2 workloads failed: replies: ")
    assert run_flow(night, [str(file), "--sample", "3", "--budget", "1h"]) == 1
    assert capsys.readouterr().err == "nightly: --sample has no deadline: leave out --until and --budget\n"
    assert nights.sql("select count(*) from runs union all select count(*) from snippets") == [(0,), (0,)]
    assert not (nights.path.parent / "copy.duckdb").exists()
    assert {path.name for path in nights.runs.iterdir()} <= {"cache", "lock"}


def test_a_killed_night_goes_on_in_the_right_step(nights: Any, write_night: Any, prefect_server: str) -> None:
    """The step under way is two workloads in one plan: what both have finished is kept, and nothing is done twice."""
    folder = nights.path.parent
    (folder / "again.toml").write_text(REPLIES.replace('"replies"', '"again"').replace("Say it", "Say it once"))
    file = write_night(partition_tokens=1, more='[[workload]]\nfile = "again.toml"\nafter = "snippets"\n')
    command = [sys.executable, "-c", "import sys; from flows.cli import batchloom; sys.exit(batchloom())"]
    environment = os.environ | {"PREFECT_API_URL": prefect_server}
    killed = subprocess.Popen([*command, "nightly", str(file)], env=environment)
    while killed.poll() is None and not list(nights.runs.glob("*-replies-*/parts/part-00001.parquet")):
        time.sleep(0.005)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL, "the night was over before it was killed"
    first, *others = night(file=file)
    assert (first.workload, first.num_rows, first.num_already_done) == ("snippets", 0, 12)
    assert [summary.workload for summary in others] == ["replies", "again"]
    assert sum(summary.num_already_done for summary in others) >= 2
    for summary in others:
        assert summary.num_ok == 12 - summary.num_already_done
        table = summary.workload
        assert nights.sql(f"select count(*), count(distinct (doc_id, query_id)) from {table}") == [(12, 12)]
    assert nights.sql("select status from runs where workload = 'replies' order by started_at, run_id")[0] == (
        "interrupted",
    )


LARGE = """
[models.large]
path = "{large}"
dtype = "float32"
kv_memory = "8MiB"

[[workload]]
file = "ranking"
model = "large"
after = "snippets"
"""


def test_a_model_is_loaded_when_it_has_rows_and_time(
    nights: Any,
    write_night: Any,
    tiny_checkpoint: Any,
    prefect_server: str,
    loads: list[tuple[Path, Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The large model's step lies between two of the small one's, which stays in memory where that step is empty."""
    text = NIGHT.replace('"snippets"\n', '"snippets"\nmodel = "small"\n')
    text = text.replace('after = "{after}"', 'model = "small"\nafter = ["snippets", "ranking"]')
    large = tiny_checkpoint("qwen2")
    file = write_night(night=text, more=LARGE.format(large=large))
    assert [summary.num_ok for summary in night(file=file)] == [12, 6, 12]
    assert [model for model, _ in loads] == [nights.model, large, nights.model]

    loads.clear()
    nights.sql("insert into queries values ('q9', 'who is it?'); insert into snippet_requests values ('d0', 'q9')")
    assert [summary.num_ok for summary in night(file=file, budget="1h")] == [1, 0, 1]
    assert [model for model, _ in loads] == [nights.model]
    loading = "select (config->>'$.prediction.load_seconds')::double from runs where workload = ? order by started_at"
    forecast = {name: nights.sql(loading, [name])[-1][0] for name in ("snippets", "replies")}
    assert forecast["snippets"] > 0 == forecast["replies"]

    loads.clear()
    monkeypatch.setattr(prediction, "forecast_load", lambda *_: 4000.0)
    nights.sql("insert into snippet_requests values ('d1', 'q9')")
    (summary,) = night(file=file, budget="1h")
    assert (summary.status, summary.num_ok, summary.num_unanswered, loads) == ("deadline", 0, 1, [])
    assert "snippets: not begun before the deadline, since its model takes 4000 s to load" in caplog.text


@pytest.mark.usefixtures("prefect_server")
def test_rows_that_cannot_be_answered_are_not_predicted(
    nights: Any, write_night: Any, caplog: pytest.LogCaptureFixture
) -> None:
    nights.sql("update documents set body = null")
    snippets, _ = night(file=write_night(), budget="1h")
    assert (snippets.status, snippets.num_errors) == ("completed", 12)
    assert "predicted" not in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"after": "nobody"}, "workload 'replies' comes after 'nobody', which is none of replies, snippets"),
        ({"after": "replies"}, "workloads wait for each other: replies after replies"),
        ({"model": "models/none/at/all"}, "no such file or folder"),
        ({"replies": REPLIES.replace('mode = "generate"', 'mode = "talk"')}, "replies.toml: line 3: mode must be"),
        (
            {"replies": REPLIES.replace("max_new_tokens = 4", "max_new_tokens = 1024")},
            "workload 'replies' with model .*tiny-llama[^:]*: answers of up to 1,024 tokens leave no room for a prompt",
        ),
        ({"night": NIGHT.replace("dtype", "dtyp")}, r"\[models.small\]: 'dtyp' is not a known key here"),
        ({"night": NIGHT.replace('"float32"', '"float33"')}, r"\[models.small\]: dtype: .*, got 'float33'"),
        (
            {"night": NIGHT.replace('"8MiB"', '"8XB"')},
            r"\[models.small\]: kv_memory must be auto or a size such as 512MiB, got '8XB'",
        ),
        (
            {"night": NIGHT.replace('dtype = "float32"', 'deterministic = "yes"')},
            r"\[models.small\]: deterministic must be true or false, got 'yes'",
        ),
        ({"more": "[machines]\nworkers = 0"}, r"\[machines\]: workers: input should be greater than .* 1, got 0"),
        ({"more": '[models]\nlarge = "models/large"'}, r"\[models\]: large must be a table, got 'models/large'"),
        ({"night": 'database = 5\n[models.a]\npath = "x"'}, "night.toml: database must be a string, got 5"),
        (
            {"night": 'database = "x"\n[models.a]\npath = "x"\n[workload]\nfile = "snippets"'},
            r"workload must be a list of tables: begin each with \[\[workload\]\], not with \[workload\]",
        ),
        (
            {"night": 'database = "x"\nworkload = ["snippets"]\n[models.a]\npath = "x"'},
            "workload 1 must be a table, got 'snippets'",
        ),
        ({"night": 'publish = "nowhere/copy.duckdb"' + NIGHT}, "publish: no folder .*nowhere"),
        ({"night": NIGHT.replace('file = "snippets"', "")}, r"\[workload 2\]: file is missing"),
        (
            {"night": NIGHT.replace("[models.small]\npath", "[models.small]\npaht")},
            r"\[models.small\]: 'paht' is not a known",
        ),
        ({"more": "[failures]\nretry = 2"}, r"\[failures\]: 'retry' is not a known key here"),
        ({"night": NIGHT.replace('database = "team.duckdb"', "")}, "night.toml: database is missing"),
        ({"night": 'publish = "a\\u0000b"' + NIGHT}, "night.toml: publish: no file's name holds a NUL, got 'a.x00b'"),
        ({"night": 'name = "topics"\nmode = "score"'}, "night.toml is a workload's file, not a night's: .* --workload"),
        ({"more": "[models"}, "cannot be read as TOML"),
        ({"more": '[attach]\ncrm = "nowhere"'}, "attach: crm: nothing is at"),
        ({"more": '[[workload]]\nfile = "ranking"\nmodel = "big"'}, "'ranking' names model 'big'.* none of small"),
        ({"sql": "select doc_id, query_id, snipet from latest_snippets"}, "no column 'snipet'"),
        ({"sql": "select doc_id, query_id from latest_snippets"}, "returns no column 'snippet'"),
        ({"sql": "select * from read_csv('/etc/passwd')"}, "no right to read /etc/passwd"),
        ({"sql": "select * from snippetz"}, "no table or view 'snippetz'"),
    ],
)
def test_check_finds_what_is_wrong(
    write_night: Any, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    file = write_night(**change)
    assert batchloom(["check", str(file)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line


def test_check_finds_all_that_is_wrong_at_once(
    nights: Any, write_night: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    nights.sql("create table rankings_log as select 1 as a; drop table queries; create table queries (query_id text)")
    file = write_night(sql="select 1 as doc_id from latest_snippets", model="models/none/at/all")
    assert batchloom(["check", str(file)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "[models.small]: model" in lines[0]
    assert "query_text" in lines[1]


def test_check_counts_the_gpus_of_this_host(
    write_night: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    file = write_night(night=NIGHT.replace("[planning]", "tensor_parallel_size = 2\n\n[planning]"))
    assert batchloom(["check", str(file)]) == 1
    assert "tensor_parallel_size 2, device 'auto': torch finds 1 GPUs here" in capsys.readouterr().err


def test_check_is_content_with_a_good_night(nights: Any, write_night: Any, capsys: pytest.CaptureFixture[str]) -> None:
    before = nights.sql("select table_name from information_schema.tables order by all")
    file = write_night()
    assert batchloom(["check", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: nothing is wrong; steps: 2, models: 1\n"
    assert nights.sql("select table_name from information_schema.tables order by all") == before
    assert not nights.runs.exists()


def test_the_revision_of_a_hub_id_is_in_the_table_of_runs(
    nights: Any, write_night: Any, tiny_llama: Path, prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(model: str, revision: str, allow_patterns: list[str]) -> str:
        assert (model, revision) == ("me/tiny", "release/v1")
        return str(tiny_llama)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    file = write_night(model="me/tiny@release/v1")
    assert batchloom(["check", str(file)]) == 0
    night(file=file)
    assert nights.sql("select model, num_ok from runs") == [("me/tiny@release/v1", 12)] * 2


def test_a_night_of_embeddings_can_be_had_again(nights: Any, write_night: Any, prefect_server: str) -> None:
    """The length of their column is the model's: the check has to know it."""
    nights.sql("create or replace table documents as select 'd1' as doc_id, 'House' as title, 'A house.' as body")
    text = NIGHT[: NIGHT.index("[[workload]]")] + '[[workload]]\nfile = "embeddings"\n'
    (first,) = night(file=write_night(night=text))
    (second,) = night(file=write_night(night=text))
    assert (first.num_ok, second.num_ok, second.num_already_done) == (1, 0, 1)


def test_paths_are_relative_to_the_file(
    nights: Any, write_night: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir("/")
    plan = load_night(write_night(night="publish = 'out/copy.duckdb'\n" + NIGHT))
    assert plan.database == nights.path
    assert plan.publish == nights.path.parent / "out" / "copy.duckdb"
    assert plan.steps[0].model == "small"
    with pytest.raises(ConfigError, match="no night file"):
        load_night(tmp_path / "none.toml")


def test_a_night_file_may_begin_with_a_byte_order_mark(nights: Any, write_night: Any) -> None:
    plan = load_night(write_night())
    assert load_night(write_night(night="\ufeff" + NIGHT)) == plan


def test_a_budget_replaces_an_end_that_has_passed(
    nights: Any, write_night: Any, prefect_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_night(night="until = 2020-01-01T00:00:00" + NIGHT)
    with pytest.raises(ConfigError, match="until 2020-01-01T00:00:00 has passed"):
        night(file=file)
    assert batchloom(["check", str(file)]) == 1
    assert capsys.readouterr().err == "check: until 2020-01-01T00:00:00 has passed\n"
    assert batchloom(["advise", str(file)]) == 0
    assert [summary.status for summary in night(file=file, budget="1h")] == ["completed", "completed"]


@pytest.mark.usefixtures("prefect_server")
def test_a_stop_request_between_two_partitions_is_not_taken_for_the_deadline(
    nights: Any, write_night: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = Pace.end

    def end_and_stop(pace: Pace, partition: int, now: float) -> None:
        end(pace, partition, now)
        (folder,) = nights.runs.glob("*-snippets-*")
        StopRequest(folder).make()

    monkeypatch.setattr(Pace, "end", end_and_stop)
    with pytest.raises(KeyboardInterrupt):
        night(file=write_night(partition_tokens=1), budget="1h")
    ((workload, status, num_ok),) = nights.sql("select workload, status, num_ok from runs")
    assert (workload, status) == ("snippets", "interrupted")
    assert 0 < num_ok < 12


def test_a_night_ends_at_its_deadline(
    nights: Any,
    write_night: Any,
    prefect_server: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What fits is written; the rest is the next night's, and so is what comes after. The deadline comes at a step."""
    nights.add_towers(1000)
    nights.sql("insert into ranking_candidates select query_id, doc_id from queries, documents where doc_id like 'm%'")
    sql = "select doc_id, query_id, label as snippet from latest_rankings"
    text = NIGHT.replace('file = "snippets"', 'file = "ranking"')
    file = write_night(partition_tokens=4000, sql=sql, after="ranking", night=text)
    steps = iter(range(120))
    has_time = StopRequest.has_time
    monkeypatch.setattr(
        StopRequest, "has_time", lambda stop, seconds: has_time(stop, seconds if next(steps, None) is not None else 1e9)
    )
    with caplog.at_level("INFO", "batchloom"):
        (summary,) = night(file=file, budget="1h")
    monkeypatch.undo()
    assert summary.status == "deadline"
    assert 0 < summary.num_ok < summary.num_rows == 6 + 3000
    assert summary.num_unanswered == summary.num_rows - summary.num_ok
    assert "left at the deadline, for the next night: ranking, replies" in caplog.text
    assert re.search(r"s to the deadline.*: [\d,]+ of 3,006 prompts, [\d,]+ of \d+ partitions, should fit", caplog.text)
    assert nights.sql("select status, error, num_unanswered from runs") == [
        ("deadline", f"{summary.num_unanswered:,} prompts were not reached before the deadline", summary.num_unanswered)
    ]
    page = next(nights.runs.glob("*/report.html")).read_text()
    titles = ("until the first step: loading the model", "rows done by the deadline", "partitions begun by then")
    assert all(title in page for title in titles)
    assert f"The run ended by its deadline: {summary.num_unanswered:,} prompts were not reached" in page
    assert re.search(r"simulated before the run, on \d+ of its \d+ partitions\.", page)
    nights.sql("delete from ranking_candidates where doc_id like 'm%'")
    first, second = night(file=file)
    assert (first.status, first.num_ok + first.num_already_done, second.num_ok) == ("completed", 6, 6)


def test_what_fits_is_chosen_over_all_models_before_the_night(
    nights: Any,
    write_night: Any,
    tiny_checkpoint: Any,
    prefect_server: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Rows of the second model cost less, so the first one ends early, and goes on in the time that is left."""
    text = NIGHT.partition("[[workload]]")[0] + '[[workload]]\nfile = "snippets"\nmodel = "small"\n'
    more = LARGE.replace('after = "snippets"\n', "").replace("ranking", "replies.toml")
    sql = "select doc_id || '-' || range as doc_id, query_id, '' as snippet from snippet_requests, range(3)"
    file = write_night(night=text, sql=sql, more=more.format(large=tiny_checkpoint("qwen2")), partition_tokens=300)
    monkeypatch.setattr(foresight, "predict_run", lambda *_: {"elapsed_seconds": 3000.0})
    monkeypatch.setattr("flows.nights.night.forecast_load", lambda *_: 0.0)
    calls, has_time = count(), StopRequest.has_time
    monkeypatch.setattr(StopRequest, "has_time", lambda stop, seconds: has_time(stop, seconds if next(calls) else 1e9))
    with caplog.at_level("INFO", "batchloom"):
        summaries = night(file=file, budget="1h")
    found = re.findall(r"(\w+): (\d+) of (\d+) prompts should fit before the deadline, (\d+) are left", caplog.text)
    chosen = {name: [int(number) for number in numbers] for name, *numbers in found}
    assert chosen["replies"] == [36, 36, 0]
    assert 0 < chosen["snippets"][0] < 5
    assert sum(chosen["snippets"][::2]) == 12
    (seconds, *_) = re.findall(r"snippets: (\d+) s to the deadline", caplog.text)
    assert int(seconds) < 600
    ends = [(summary.workload, summary.status) for summary in summaries]
    assert ends == [("snippets", "deadline"), ("replies", "completed"), ("snippets", "completed")]
    assert summaries[0].num_ok + summaries[2].num_ok == 12
    assert summaries[0].num_ok < 12
    assert nights.sql("select count(*), count(distinct (doc_id, query_id)) from snippets") == [(12, 12)]
    assert "left at the deadline" not in caplog.text
    with caplog.at_level("INFO", "batchloom"):
        night(file=file, budget="1h", full=True)
    assert re.search(r"snippets: .* are left for the next night \(rows answered before only with --full\)", caplog.text)
