"""Writing answers is atomic and repeatable, and gives one row for each requested row."""

import math
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from engine.errors import ArtifactError, DatabaseError
from tasks.answers.text import Decoding
from tasks.partitions.part import STEPS_SCHEMA
from tasks.recover import recover_runs
from tasks.report_page.findings import find_remarkable
from tasks.runs.run import Run
from tasks.storage.artifact import ArtifactRef
from tasks.write import write_run
from tests.sql.conftest import write_rows
from tests.sql.report_facts import read_facts

ANSWERS = "select * exclude (created_at) from snippets order by all"


def score(values: dict[str, float]) -> Any:
    """Answers for a ranking: doc_id to probability of the first label."""

    def answer(row: dict[str, Any]) -> dict[str, Any]:
        value = values[row["doc_id"]]
        logprobs = [math.log(value), math.log1p(-value)]
        label = "Yes" if value >= 0.5 else "No"
        return {"score": value, "label": label, "label_logprobs": logprobs, "finish_reason": "scored"}

    return answer


def test_every_row_is_answered_once_with_its_counts(night: Any) -> None:
    run = night.run()
    assert night.sql(
        "select doc_id, query_id, snippet, status, error, finish_reason, num_prompt_tokens, num_cached_tokens, "
        "num_output_tokens, model, run_id from snippets order by all"
    ) == [
        ("d1", "q1", "body 1 / query 1", "ok", None, "eos", 10, 4, 2, "tiny", run.record.run_id),
        ("d1", "q2", "body 1 / query 2", "ok", None, "eos", 10, 4, 2, "tiny", run.record.run_id),
        ("d2", "q1", "body 2 / query 1", "ok", None, "eos", 10, 4, 2, "tiny", run.record.run_id),
    ]
    (result,) = night.results
    assert (result.num_rows, result.num_ok, result.num_errors, result.num_unanswered) == (3, 3, 0, 0)
    assert night.sql("select typeof(created_at), now() - created_at < interval 1 minute from snippets limit 1") == [
        ("TIMESTAMP WITH TIME ZONE", True)
    ]


def test_the_run_and_its_steps(night: Any) -> None:
    night.sql("insert into snippet_requests values ('d1', null)")
    run = night.run(
        answer=lambda row: None if row["doc_id"] == "d2" else {"answer": "a", "finish_reason": "length"},
        seconds={"read": 0.5, "tokenize": 0.25, "plan": 0.125, "infer": 4.0},
        token_saving_ratio=0.5,
        best_token_saving_ratio=0.75,
        num_already_done=7,
        config={"max_num_batched_tokens": 1024},
        versions={"duckdb": "2.0"},
        status="interrupted",
        error="stopped by a signal",
    )
    columns = (
        "workload, status, error, num_rows, num_ok, num_errors, num_unanswered, num_already_done, num_prompt_tokens, "
        "num_cached_tokens, num_output_tokens, num_computed_tokens, token_saving_ratio, best_token_saving_ratio, "
        "tokens_per_second, read_seconds, tokenize_seconds, plan_seconds, infer_seconds, num_steps, model, "
        "model_digest, workload_digest, config->>'max_num_batched_tokens', versions->>'duckdb'"
    )
    (row,) = night.sql(f"select {columns} from runs")
    assert row[:12] == ("snippets", "interrupted", "stopped by a signal", 4, 2, 1, 1, 7, 20, 8, 4, 6)
    assert row[12:20] == (0.5, 0.75, 6.0, 0.5, 0.25, 0.125, 4.0, 2)
    assert row[20:] == ("tiny", "model-1", run.workload.digest, "1024", "2.0")
    assert night.sql("select write_seconds > 0, finished_at >= started_at from runs") == [(True, True)]
    assert night.sql('select run_id, "partition", step, num_kv_blocks_total, duration_ms from steps order by step') == [
        (run.record.run_id, 1, 1, 1, 1.0),
        (run.record.run_id, 1, 2, 1, 1.0),
    ]
    assert night.sql("select num_unanswered, num_saved_tokens, saved_percent, best_saved_percent from run_summary") == [
        (1, 8, 40.0, 75.0)
    ]


def test_writing_twice_leaves_one_of_each_row_and_its_first_time(night: Any) -> None:
    run = night.run()
    answers, times = night.sql(ANSWERS), night.sql("select distinct created_at from snippets")
    run.write()
    assert night.sql(ANSWERS) == answers
    assert night.sql("select distinct created_at from snippets") == times
    assert night.sql("select (select count(*) from runs), (select count(*) from steps)") == [(1, 2)]


def test_an_old_run_written_again_stays_old(night: Any) -> None:
    old = night.run()
    night.run(answer=lambda row: {"answer": "new", "finish_reason": "eos"}, full=True)
    old.write()
    assert night.sql("select distinct snippet from latest_snippets") == [("new",)]
    assert night.sql("select count(*) from snippets") == [(6,)]


def test_a_run_that_is_written_after_newer_ones_is_older_than_they_are(night: Any) -> None:
    """Its answers waited, because its workload could not be read."""
    waiting = night.prepare()
    night.sql("update documents set body = 'new'")
    night.run()
    assert waiting.write().num_ok == 3
    assert night.sql("select distinct snippet from latest_snippets order by all") == [
        ("new / query 1",),
        ("new / query 2",),
    ]
    assert night.prepare().read.num_selected == 0


def test_an_answer_is_the_newest_where_the_clock_was_set_back(night: Any) -> None:
    night.run()
    night.sql("update snippets set created_at = created_at + interval 1 year")
    night.sql("update documents set body = 'new'")
    night.run()
    assert night.sql("select distinct snippet from latest_snippets order by all") == [
        ("new / query 1",),
        ("new / query 2",),
    ]
    assert night.prepare().read.num_selected == 0


def test_a_run_that_a_later_night_writes_took_until_its_last_step(night: Any) -> None:
    """Its process was killed an hour after it had begun, a day ago."""
    prepared = night.prepare(status="running")
    run = Run.load(night.path, Path(prepared.read.requests.path).parent)
    began = datetime.now(UTC) - timedelta(days=1)
    run.note({"requests": prepared.read.requests, "tokens": prepared.tokens}, started_at=began.isoformat())
    (steps,) = prepared.steps
    rows = [row | {"started_at": began + timedelta(hours=1)} for row in pq.read_table(steps.path).to_pylist()]
    write_rows(Path(steps.path), STEPS_SCHEMA, rows)
    assert [recovered.record.run_id for recovered in recover_runs(night.path)] == [run.record.run_id]
    assert night.sql("select status, num_ok, total_seconds from run_summary") == [("interrupted", 3, 3600.0)]


def test_unfinished_parts_stay_to_be_done_and_can_be_added(night: Any) -> None:
    run = night.prepare(num_parts=3)
    whole, run.parts = run.parts, run.parts[:1]
    assert run.write().num_unanswered == 2
    assert [(row["doc_id"], row["query_id"]) for row in night.prepare().rows()] == [("d1", "q2"), ("d2", "q1")]
    run.parts = whole
    summary = run.write()
    assert (summary.num_unanswered, "left for" in summary.text) == (0, False)
    assert night.prepare().read.num_selected == 0


def test_rows_that_a_full_run_left_keep_their_answers_unless_it_is_full_again(night: Any) -> None:
    night.run()
    run = night.prepare(full=True, num_parts=3, config={"full": True})
    run.parts = run.parts[:1]
    assert ", 2 left for the next run (rows answered before only with --full), " in run.write().text
    assert night.prepare().read.num_selected == 0
    assert night.prepare(full=True).read.num_selected == 3
    findings = find_remarkable(read_facts(night, run.record.run_id))
    assert "2 rows are left for the next run (rows answered before only with --full)." in findings


def test_a_row_in_two_parts_is_written_once_the_good_one(night: Any) -> None:
    run = night.prepare(num_parts=1)
    again = night.prepare(answer=lambda row: {"finish_reason": "error", "error": "lost"}, num_parts=1)
    run.parts = [*again.parts, *run.parts]
    run.write()
    assert night.sql("select count(*), bool_and(status = 'ok') from snippets") == [(3, True)]


def test_writing_keeps_to_its_memory_limit(night: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.write.MEMORY_LIMIT", "1kB")
    with pytest.raises(DatabaseError, match=r"(?i)memory"):
        night.run()


def test_a_night_with_nothing_to_do_leaves_a_run(night: Any) -> None:
    night.run()
    run = night.run()
    assert night.sql("select num_rows, num_ok, num_errors from runs where run_id = ?", [run.record.run_id]) == [
        (0, 0, 0)
    ]


def test_a_run_that_ended_before_it_had_read(night: Any) -> None:
    run = night.prepare(status="failed", error="no such model")
    failed = Run(night.path, Path(run.read.requests.path).parent, run.record)
    for path in failed.folder.glob("*s/part-*.parquet"):
        path.unlink()
    write_run(failed, run.workload)
    assert night.sql("select status, error, num_rows from runs") == [("failed", "no such model", 0)]
    failed.artifacts = {"requests": run.read.requests}
    write_run(failed, run.workload)
    assert night.sql("select num_rows, num_unanswered from runs") == [(3, 3)]


def test_an_error_halfway_leaves_nothing(night: Any) -> None:
    night.run()
    before = [night.sql(ANSWERS), night.sql("from runs"), night.sql("from steps order by all")]
    run = night.prepare(full=True)
    run.steps = [run.tokens]  # a whole artifact, of other columns: the last insert but one fails
    with pytest.raises(DatabaseError, match='Table "steps" does not have a column'):
        run.write()
    assert [night.sql(ANSWERS), night.sql("from runs"), night.sql("from steps order by all")] == before


class InterruptedSteps(list[ArtifactRef]):
    """Steps that are read twice, first to be checked, then inside the transaction, where Ctrl-C is pressed."""

    num_reads = 0

    def __iter__(self) -> Iterator[ArtifactRef]:
        self.num_reads += 1
        if self.num_reads > 1:
            raise KeyboardInterrupt
        return super().__iter__()


@pytest.mark.parametrize(
    ("change", "message", "undo"),
    [
        (
            "alter table snippets rename to kept; create table snippets as select 1 as a",
            "table 'snippets' is not batchloom's, which writes answers to a table that it makes",
            "drop table snippets; alter table kept rename to snippets",
        ),
        (
            "create or replace view run_summary as select 1 as a",
            "batchloom has not made the view 'run_summary' and would replace it: rename it",
            "drop view run_summary",
        ),
    ],
)
def test_what_took_a_name_during_the_night_is_kept(night: Any, change: str, message: str, undo: str) -> None:
    run = night.prepare()
    if "table" in change:
        for view in ("failed_rows", "latest_snippets"):
            night.sql(f"drop view {view}")
    night.sql(change)
    with pytest.raises(DatabaseError, match=message):
        run.write()
    assert night.sql("select count(*) from runs") == [(0,)]
    name = "snippets" if "table" in change else "run_summary"
    assert night.sql(f"from {name}") == [(1,)]
    night.sql(undo)
    assert run.write().num_ok == 3


def test_ctrl_c_inside_the_transaction_leaves_nothing(night: Any) -> None:
    run = night.prepare()
    steps, run.steps = run.steps, InterruptedSteps(run.steps)
    with pytest.raises(KeyboardInterrupt):
        run.write()
    assert night.sql("select (select count(*) from snippets), (select count(*) from runs)") == [(0, 0)]
    run.steps = steps
    assert run.write().num_ok == 3


KILLED = """
import sys, time
from tasks.storage.artifact import describe_parquet
from pathlib import Path
from tasks.runs.run import Run
from tasks.workloads.workload import load_workload
from tasks.write import write_run

class SlowSteps(list):
    num_reads = 0
    def __iter__(self):
        self.num_reads += 1
        if self.num_reads > 1:
            print("inside", flush=True)
            time.sleep(600)
        return super().__iter__()

database, folder = sys.argv[1:]
names = ("requests", "tokens", "steps/part-00000")
requests, tokens, steps = (describe_parquet(f"{folder}/{name}.parquet") for name in names)
run = Run.load(database, Path(folder))
run.artifacts = {"requests": requests, "tokens": tokens}
run.list_steps = lambda: SlowSteps([steps])
write_run(run, load_workload("snippets"))
"""


def test_a_process_killed_inside_the_transaction_leaves_nothing(night: Any) -> None:
    night.run()
    before = [night.sql(ANSWERS), night.sql("from runs")]
    run = night.prepare(full=True)
    folder = str(Path(run.read.requests.path).parent)
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(night.path), folder], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "inside\n"
        child.kill()
    assert [night.sql(ANSWERS), night.sql("from runs")] == before
    assert run.write().num_ok == 3


@pytest.mark.parametrize("which", ["requests", "tokens", "part", "steps"])
def test_a_damaged_artifact_is_found_before_the_database_is_touched(night: Any, which: str) -> None:
    run = night.prepare()
    damaged = {"requests": run.read.requests, "tokens": run.tokens, "part": run.parts[0], "steps": run.steps[0]}[which]
    content = bytearray(Path(damaged.path).read_bytes())
    content[len(content) // 2] ^= 1
    Path(damaged.path).write_bytes(content)
    with pytest.raises(ArtifactError, match="changed or damaged"):
        run.write()
    assert night.sql("select count(*) from runs") == [(0,)]


def test_only_whole_parts_of_a_folder_are_written(night: Any) -> None:
    run = night.prepare(num_parts=3)
    folder = Path(run.read.requests.path).parent
    torn = Path(run.parts[1].path)
    torn.write_bytes(torn.read_bytes()[:-9])
    (folder / "parts" / ".part-00009.parquet.1-ab.tmp").write_bytes(b"PAR1")
    run.parts = Run.load(night.path, folder).list_parts()
    (folder / "parts" / ".part-00009.parquet.1-ab.tmp").unlink()
    assert [Path(ref.path).name for ref in run.parts] == ["part-00000.parquet", "part-00002.parquet"]
    assert run.write().num_ok == 2


def test_ranks_are_dense_within_a_query_and_ties_go_by_key(night: Any) -> None:
    night.sql("insert into documents select 'e' || i, 't', 'body' from range(3) t(i)")
    night.sql("insert into ranking_candidates select 'q1', doc_id from documents")
    night.sql("insert into ranking_candidates values ('q2', 'd1'), ('q2', 'absent')")
    values = {"d1": 0.5, "d2": 0.75, "e0": 0.5, "e1": 0.9, "e2": 0.1}
    night.run("ranking", score(values))
    ranked = "select query_id, doc_id, rank, label from rankings order by query_id, rank nulls last"
    assert night.sql(ranked) == [
        ("q1", "e1", 1, "Yes"),
        ("q1", "d2", 2, "Yes"),
        ("q1", "d1", 3, "Yes"),
        ("q1", "e0", 4, "Yes"),
        ("q1", "e2", 5, "No"),
        ("q2", "d1", 1, "Yes"),
        ("q2", "absent", None, None),
    ]
    assert night.sql(
        "select score, round(exp(label_logprobs[1]), 12), finish_reason from rankings where rank = 1 "
        "and query_id = 'q1'"
    ) == [(0.9, 0.9, "scored")]


def test_ranks_of_touched_queries_count_older_answers_too(night: Any) -> None:
    night.sql("insert into ranking_candidates values ('q1', 'd1'), ('q2', 'd1')")
    first = night.run("ranking", score({"d1": 0.5}))
    night.sql("insert into ranking_candidates values ('q1', 'd2')")
    second = night.run("ranking", score({"d2": 0.75}))
    assert second.read.num_selected == 1
    assert night.sql("select run_id, query_id, doc_id, rank from rankings order by query_id, rank") == [
        (second.record.run_id, "q1", "d2", 1),
        (first.record.run_id, "q1", "d1", 2),
        (first.record.run_id, "q2", "d1", 1),
    ]
    night.sql("update documents set body = 'worse' where doc_id = 'd2'")
    night.run("ranking", score({"d2": 0.25}))
    assert night.sql("select doc_id, rank from latest_rankings where query_id = 'q1' order by rank") == [
        ("d1", 1),
        ("d2", 2),
    ]
    assert night.sql("select rank from rankings where run_id = ?", [first.record.run_id]) == [(1,), (1,)]


def test_a_candidate_listed_twice_shares_its_rank(night: Any) -> None:
    night.sql("insert into ranking_candidates values ('q1', 'd1'), ('q1', 'd1'), ('q1', 'd2')")
    night.run("ranking", score({"d1": 0.75, "d2": 0.5}))
    assert night.sql("select doc_id, rank from rankings order by all") == [("d1", 1), ("d1", 1), ("d2", 2)]
    assert night.sql("select doc_id, rank from latest_rankings order by all") == [("d1", 1), ("d2", 2)]


def test_a_failed_candidate_leaves_the_ranks(night: Any) -> None:
    night.sql("insert into ranking_candidates values ('q1', 'd1'), ('q1', 'd2')")
    night.run("ranking", score({"d1": 0.75, "d2": 0.5}))
    night.sql("update documents set body = null where doc_id = 'd1'")
    night.run("ranking", score({}))
    assert night.sql("select doc_id, rank, status from latest_rankings order by all") == [
        ("d1", None, "error"),
        ("d2", 1, "ok"),
    ]
    assert night.sql("select doc_id, rank from rankings where status = 'ok' and doc_id = 'd2'") == [("d2", 1)]


def test_a_reference_with_another_row_count_is_refused(night: Any) -> None:
    run = night.prepare()
    run.tokens = ArtifactRef(path=run.tokens.path, num_rows=run.tokens.num_rows + 1, digest=run.tokens.digest)
    with pytest.raises(ArtifactError, match="has 3 rows, expected 4"):
        run.write()


def test_a_lock_is_waited_for(night: Any) -> None:
    run = night.prepare()
    program = f"import duckdb, time; c = duckdb.connect({str(night.path)!r}); print(1, flush=True); time.sleep(1.5)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        started = time.monotonic()
        assert run.write().num_ok == 3
        assert time.monotonic() - started > 0.5


def test_a_workload_that_shares_an_output_table(night: Any) -> None:
    run = night.run()
    other = replace(run.workload, name="longer", kind=replace(run.workload.kind, decoding=Decoding(max_new_tokens=99)))
    night.run(other, lambda row: {"answer": "longer", "finish_reason": "eos"})
    assert night.sql("select distinct snippet from latest_snippets") == [("longer",)]
    assert night.sql("select workload from run_summary") == [("longer",), ("snippets",)]
