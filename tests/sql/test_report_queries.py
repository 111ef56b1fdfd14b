"""The numbers of a report that come from runs, answers and plans, from SQL alone: histograms, groups, reasons."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.errors import DatabaseError
from sql import statement
from tasks.database.connection import connect
from tasks.database.existing_tables import ADDED_TO_STEPS
from tasks.report_page.facts import read_run, read_run_facts
from tasks.storage.artifact import describe_parquet, write_parquet
from tasks.storage.schemas import PLAN_SCHEMA
from tasks.workloads.workload import load_workload
from tests.sql.report_facts import CONFIG, read_facts

SAME = {"num_common_tokens": 0, "partition": 0, "priority": 0, "token_ids": [1]}
COLUMN_TYPES = "select table_name, column_name, data_type from information_schema.columns order by all"


@pytest.fixture
def scratch() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as connection:
        connection.execute(statement("report/nice_width"))
        yield connection


@pytest.mark.parametrize(
    ("longest", "width"),
    [(0, 1), (9, 1), (10, 2), (19, 2), (20, 5), (49, 5), (50, 10), (1234, 200), (10**7, 2 * 10**6)],
)
def test_nice_widths_reach_past_the_longest(scratch: duckdb.DuckDBPyConnection, longest: int, width: int) -> None:
    assert scratch.execute("select report_nice_width(?, 10)", [longest]).fetchall() == [(width,)]


def test_lengths_and_cached_shares_count_every_answered_row(night: Any) -> None:
    lengths = {("d1", "q1"): (100, 100, 0), ("d1", "q2"): (100, 99, 7), ("d2", "q1"): (37, 0, 48)}

    def answer(row: dict[str, Any]) -> dict[str, Any]:
        prompt, cached, output = lengths[row["doc_id"], row["query_id"]]
        counts = {"num_prompt_tokens": prompt, "num_cached_tokens": cached, "num_output_tokens": output}
        return {"answer": "yes", "finish_reason": "eos", **counts}

    night.sql("insert into snippet_requests values ('gone', 'q1')")
    night.run(answer=answer)
    facts = read_facts(night)
    found = {
        kind: [(each.low, each.high, each.num_rows) for each in facts.lengths if each.kind == kind and each.num_rows]
        for kind in ("prompt", "computed", "output")
    }
    assert found == {
        "prompt": [(30, 40, 1), (100, 110, 2)],
        "computed": [(0, 5, 2), (35, 40, 1)],
        "output": [(0, 5, 1), (5, 10, 1), (45, 50, 1)],
    }
    prompt = [each for each in facts.lengths if each.kind == "prompt"]
    assert [each.low for each in prompt] == list(range(0, 110, 10)), "empty bins are there, too"
    assert [each.num_rows for each in facts.cached_shares] == [1, 0, 0, 0, 0, 0, 0, 0, 0, 2]


def test_share_degrees_and_prefix_lengths_of_a_plan(night: Any, make_run: Callable[..., str], tmp_path: Path) -> None:
    members = {0: (1, 0), 1: (3, 0), 2: (2, 50), 3: (8, 100), 4: (9, 100), 5: (16, 7), 6: (17, 30)}
    rows = [
        {"row_id": 0, "group_id": group, "member_id": member, "num_prefix_tokens": prefix} | SAME
        for group, (num_members, prefix) in members.items()
        for member in range(num_members)
        for _ in range(2 if (group, member) == (2, 1) else 1)  # one prompt is asked twice
    ]
    plan = tmp_path / "plan.parquet"
    write_parquet(plan, PLAN_SCHEMA, [pa.RecordBatch.from_pylist(rows, schema=PLAN_SCHEMA)])
    make_run()
    facts = read_facts(night, plan=plan)
    assert [
        (each.low, each.high, each.num_groups, each.num_prompts, each.num_rows) for each in facts.share_degrees
    ] == [
        (1, 1, 4, 4, 4),  # without a prefix nothing is shared
        (2, 2, 1, 2, 3),
        (8, 8, 1, 8, 8),
        (9, 16, 2, 25, 25),
        (17, 32, 1, 17, 17),
    ]
    assert [(each.low, each.num_rows) for each in facts.lengths if each.kind == "prefix" and each.num_rows] == [
        (0, 1),
        (30, 1),
        (50, 1),
        (100, 2),
    ]


def test_groups_are_told_by_what_they_cost(night: Any, tmp_path: Path) -> None:
    costs = {("d1", "q1"): (7.0, 4), ("d1", "q2"): (1.0, 4), ("d2", "q1"): (24.0, 9)}

    def answer(row: dict[str, Any]) -> dict[str, Any]:
        compute_ms, group = costs[row["doc_id"], row["query_id"]]
        return {"answer": "yes", "finish_reason": "eos", "compute_ms": compute_ms, "prefix_group": group}

    night.sql("insert into snippet_requests values ('gone', 'q1')")
    night.run(answer=answer, config={"workload": {"key": ["doc_id", "query_id"]}})
    rows = [{"row_id": n, "group_id": 4, "member_id": n, "num_prefix_tokens": 80} | SAME for n in range(2)]
    plan = tmp_path / "plan.parquet"
    write_parquet(plan, PLAN_SCHEMA, [pa.RecordBatch.from_pylist(rows, schema=PLAN_SCHEMA)])
    dearest, other = read_facts(night, plan=plan).slow_groups
    assert (dearest.prefix_group, dearest.num_groups, dearest.num_rows) == (9, 2, 1)
    assert (dearest.seconds, dearest.share_of_time) == (pytest.approx(0.024), pytest.approx(0.75))
    assert (dearest.share_degree, dearest.num_prefix_tokens) == (None, None), "the plan does not hold it"
    assert (other.prefix_group, other.num_rows, other.seconds) == (4, 2, pytest.approx(0.008))
    assert (other.share_degree, other.num_prefix_tokens) == (2, 80)
    assert (other.num_prompt_tokens, other.num_computed_prompt_tokens, other.num_output_tokens) == (20, 12, 4)
    assert (dearest.dearest_key, other.dearest_key) == ("d2, q1", "d1, q1")
    assert [each.share_degree for each in read_facts(night).slow_groups] == [None, None]
    night.sql("update runs set config = '{}'")
    keys = night.sql("select content_key from snippets where doc_id = 'd2'")
    assert [(read_facts(night).slow_groups[0].dearest_key,)] == keys


def test_a_database_and_a_run_of_an_earlier_version(night: Any) -> None:
    """Its tables lack columns: a report reads them all the same, and the next run adds them."""
    types = night.sql(COLUMN_TYPES)
    first = night.prepare(config=CONFIG)
    for path in (*first.parts, *first.steps):
        table = pq.read_table(path.path)
        new = {"compute_ms", "prefix_group", "num_prefix_kv_blocks", "num_request_kv_blocks", "num_cached_kv_blocks"}
        new |= ADDED_TO_STEPS.keys()
        pq.write_table(table.drop_columns([name for name in table.column_names if name in new]), path.path)
    first.parts, first.steps = ([describe_parquet(ref.path) for ref in refs] for refs in (first.parts, first.steps))
    night.sql("drop view latest_snippets cascade")
    for table, column in (
        ("snippets", "compute_ms"), ("snippets", "prefix_group"), ("rankings", "compute_ms"),
        *(("steps", column) for column in ADDED_TO_STEPS),
    ):  # fmt: skip
        night.sql(f"alter table {table} drop column {column}")
    night.sql("insert into steps by name select 'old' as run_id, 0 as partition, 3 as step, 5 as num_kv_blocks_used")
    columns = "compute_ms, prefix_group"
    first.write()
    assert night.sql(f"select {columns} from snippets") == [(None, None)] * 3
    facts = read_facts(night)
    assert [(each.max_kv_blocks, each.prefix_kv_blocks_at_max) for each in facts.bins] == [(1, None)] * 2
    assert (facts.totals.num_engines, facts.totals.num_padding_tokens, facts.totals.peak_swapped_kv_blocks) == (1, 0, 0)
    added = night.sql(f"select {', '.join(ADDED_TO_STEPS)} from steps where run_id <> 'old'")
    assert added == [(None,) * len(ADDED_TO_STEPS)] * 2
    assert (list(facts.slow_groups), facts.run.num_ok) == ([], 3)
    night.sql("alter table steps drop column num_prefix_kv_blocks")
    night.sql("alter table snippets drop column compute_ms")
    assert (len(read_facts(night).bins), list(read_facts(night).slow_groups)) == (2, [])

    second = night.run(full=True, config=CONFIG)
    assert night.sql(f"select {columns} from latest_snippets") == [(2.5, 0)] * 3
    assert night.sql(COLUMN_TYPES) == types, "as in a database of this version"
    assert read_facts(night, second.record.run_id).bins[0].prefix_kv_blocks_at_max == 1
    assert night.sql("select num_kv_blocks_used, num_prefix_kv_blocks from steps where run_id = 'old'") == [(5, None)]
    night.run("ranking", lambda row: {"score": 0.5, "label": "Yes", "label_logprobs": [0.0], "finish_reason": "scored"})
    assert night.sql(f"select {columns} from latest_rankings") == []
    assert night.sql("select compute_ms from rankings") == []


def test_a_plan_that_is_damaged_counts_as_gone(night: Any, make_run: Callable[..., str], tmp_path: Path) -> None:
    plan = tmp_path / "plan.parquet"
    row = {"row_id": 0, "group_id": 0, "member_id": 0, "num_prefix_tokens": 3} | SAME
    ref = write_parquet(plan, PLAN_SCHEMA, [pa.RecordBatch.from_pylist([row], schema=PLAN_SCHEMA)])
    make_run()
    with connect(night.path, read_only=True) as connection:
        run = read_run(connection)
        assert len(read_run_facts(connection, run, ref).share_degrees) == 1
        plan.write_bytes(plan.read_bytes()[:-1] + b"x")
        assert read_run_facts(connection, run, ref).share_degrees == []


def test_errors_are_counted_by_reason(night: Any) -> None:
    night.sql("insert into snippet_requests values ('gone', 'q1'), ('o''ther', 'q1'), ('d1', 'no query')")
    night.sql("update documents set body = null where doc_id = 'd2'")
    night.run()
    assert [(each.reason, each.num_rows, each.finish_reason) for each in read_facts(night).errors] == [
        ("doc_id … is not in documents", 2, "invalid"),
        ("body is NULL", 1, "invalid"),
        ("query_id … is not in queries", 1, "invalid"),
    ]


def test_a_workload_of_ones_own_has_its_answers_found(night: Any, tmp_path: Path) -> None:
    path = tmp_path / "topics.toml"
    path.write_text(
        """
        name = "topics"
        mode = "generate"
        requests_sql = "topics.sql"
        key = ["doc_id"]
        [prompt]
        template = "{body}"
        chat = false
        [decoding]
        max_new_tokens = 4
        [output]
        table = "topics"
        answer_column = "topic"
        """
    )
    (tmp_path / "topics.sql").write_text("select doc_id, body, null as error from documents")
    night.run()
    night.run(load_workload(str(path)), lambda row: {"answer": row["body"], "finish_reason": "eos"})
    facts = read_facts(night)
    assert facts.run.workload == "topics"
    assert sum(each.num_rows for each in facts.cached_shares) == 2


def test_the_newest_run_unless_one_is_named(night: Any) -> None:
    first = night.run().record.run_id
    second = night.run(full=True).record.run_id
    night.sql("update runs set started_at = '2999-01-01 00:00:00+00' where run_id = ?", [second])
    assert read_facts(night).run.run_id == second
    assert read_facts(night, first).run.run_id == first
    assert read_facts(night).run.started_at_utc == "2999-01-01 00:00:00"
    with pytest.raises(DatabaseError, match="no run 'nonsense' in table runs"):
        read_facts(night, "nonsense")


def test_a_run_that_found_nothing_to_do_has_no_steps_and_no_rows(night: Any) -> None:
    run = night.prepare()
    night.sql("delete from snippet_requests")
    run = night.prepare()
    run.steps.clear()
    run.write()
    facts = read_facts(night, run.record.run_id)
    assert (facts.run.num_rows, facts.totals.num_steps, facts.totals.tecd_seconds) == (0, 0, 0.0)
    assert facts.totals.utilisation is None
    assert (list(facts.bins), list(facts.lengths), list(facts.errors)) == ([], [], [])


def test_the_newest_run_is_one_that_had_something_to_do_if_there_is_any(night: Any) -> None:
    busy, idle = night.run().record.run_id, night.run().record.run_id
    night.sql("update runs set started_at = '2999-01-01 00:00:00+00' where run_id = ?", [idle])
    assert read_facts(night).run.run_id == busy
    night.sql("update runs set status = 'failed' where run_id = ?", [idle])
    assert read_facts(night).run.run_id == idle, "a run that failed before it had read rows"
    night.sql("update runs set status = 'completed'")
    night.sql("delete from runs where run_id = ?", [busy])
    assert read_facts(night).run.run_id == idle


def test_no_run_yet_and_no_tables_at_all(night: Any, tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="no run in table runs yet"):
        read_facts(night)
    other = tmp_path / "other.duckdb"
    duckdb.connect(str(other)).close()
    with pytest.raises(DatabaseError, match="no table or view 'runs'"), connect(other, read_only=True) as connection:
        read_run(connection)


def test_the_database_stays_as_it_is(night: Any, make_run: Callable[..., str]) -> None:
    make_run([(0, 1, 1, 1.0)])
    before = night.sql("select table_name from information_schema.tables order by all")
    read_facts(night)
    assert night.sql("select table_name from information_schema.tables order by all") == before


def test_a_prediction_is_what_the_config_holds(night: Any, make_run: Callable[..., str]) -> None:
    make_run([(0, 1, 1, 1.0)])
    assert read_facts(night).prediction == {}
    night.sql("update runs set config = ?::json", [json.dumps(CONFIG | {"prediction": {"num_steps": 3}})])
    assert read_facts(night).prediction == {"num_steps": 3}


def test_the_documented_query_is_of_the_newest_run_with_rows(night: Any) -> None:
    night.run()
    night.run()
    query = (Path(__file__).parents[2] / "docs" / "report.md").read_text().split("```sql\n")[1].split("```")[0]
    assert night.sql("select num_rows from runs order by started_at") == [(3,), (0,)]
    assert night.sql(query) == [("d1", 3, 0.0075)]
