"""A column of the database that says which rows come first, from the workload's file to the order of partitions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from engine.errors import DatabaseError, WorkloadError
from engine.planning.planner import plan_prompts
from flows.settings import EngineSettings
from tasks.prompts.prompt import RequestForm
from tasks.workloads.workload import load_workload

WORKLOAD = """
name = "urgent"
mode = "generate"
requests_sql = "urgent.sql"
key = ["doc_id"]
priority = "urgency"
[prompt]
template = "{body}"
chat = false
[decoding]
max_new_tokens = 4
[output]
table = "urgent_answers"
answer_column = "answer"
"""


@pytest.fixture
def write_workload(tmp_path: Path) -> Callable[..., str]:
    """Writes the workload with its query; returns the path of its file."""

    def write(query: str, old: str = "", new: str = "") -> str:
        (tmp_path / "urgent.sql").write_text(query)
        (tmp_path / "urgent.toml").write_text(WORKLOAD.replace(old, new))
        return str(tmp_path / "urgent.toml")

    return write


@pytest.mark.usefixtures("prefect_server")
def test_rows_of_higher_priority_are_in_earlier_partitions(nights: Any, write_workload: Callable[..., str]) -> None:
    nights.sql(
        "create table notes as select 'n' || lpad(i::text, 2, '0') as doc_id,"
        " chr((65 + i % 20)::int) || ' walks at night around house ' || i as body,"
        " if(i < 20, case i % 5 when 0 then 9 when 1 then -2 when 2 then null else 3 end, null)::smallint as urgency"
        " from range(40) as notes (i)"
    )
    path = write_workload("select doc_id, body, urgency, null as error from notes")
    (summary,) = nights.run(path, partition_tokens=60)
    assert summary.num_ok == 40
    (plan,) = (nights.runs / "cache").glob("plan-*.parquet")
    rows = duckdb.sql(f"select row_id, partition, priority from '{plan}' order by row_id").fetchall()
    expected = nights.sql("select coalesce(urgency, 0) from notes order by doc_id")
    assert [(priority,) for _, _, priority in rows] == expected, "no other column decides, and null is 0"
    highest = duckdb.sql(f"select max(priority) from '{plan}' group by partition order by partition").fetchall()
    assert len(highest) > 4
    assert highest == sorted(highest, reverse=True)
    assert highest[0] == (9,) > highest[-1], "where nobody of the group is urgent, it waits"

    nights.sql("update notes set urgency = 5")
    (again,) = nights.run(path)
    assert (again.num_rows, again.num_already_done) == (0, 40), "an answer does not depend on it"


@pytest.mark.usefixtures("prefect_server")
def test_the_most_urgent_start_first_within_a_partition_and_across(
    nights: Any, write_workload: Callable[..., str]
) -> None:
    """One request at a time, so that each prefill step is one prompt, known by its length."""
    nights.sql(
        "create table notes as select 'n' || lpad(i::text, 2, '0') as doc_id,"
        " repeat(chr((65 + i)::int) || ' ', i + 3) as body, (i * 7 % 12)::bigint as urgency from range(12) as notes (i)"
    )
    path = write_workload("select doc_id, body, urgency, null as error from notes")
    prompts = "select num_suffix_tokens from steps where run_id = ? and num_suffix_tokens > 0 order by started_at"
    lengths = "select num_prompt_tokens from urgent_answers join notes using (doc_id) where run_id = ? order by {}"
    one_by_one = {"dtype": "float32", "kv_memory": "8MiB", "max_running_requests": 1, "prefill": "whole"}
    for order, by, partition_tokens in (
        ("fcfs", "doc_id", 10**6),
        ("priority", "urgency desc", 10**6),
        ("priority", "urgency desc", 1),
    ):
        engine = EngineSettings(**one_by_one, order=order)
        (run,) = nights.run(path, engine=engine, partition_tokens=partition_tokens, full=True)
        started = nights.sql(prompts, [run.run_id])
        assert len(set(started)) == 12
        assert started == nights.sql(lengths.format(by), [run.run_id]), order
    partitions = nights.sql("select max(partition) from steps where run_id = ?", [run.run_id])
    assert partitions == [(11,)]


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("'high' as urgency", "column 'urgency' as VARCHAR; a priority is a whole number of type BIGINT"),
        ("1.5 as urgency", r"column 'urgency' as DECIMAL\(2,1\)"),
        ("1 as importance", "no column 'urgency'; it returns doc_id, body, importance, error"),
    ],
)
def test_a_priority_that_is_no_whole_number_is_an_error_before_any_work(
    nights: Any, write_workload: Callable[..., str], column: str, message: str
) -> None:
    path = write_workload(f"select doc_id, body, {column}, null as error from documents")
    with pytest.raises(
        DatabaseError, match=f"the query of workload 'urgent' returns {message.removeprefix('returns ')}"
    ):
        nights.run(path)
    assert not list(nights.runs.glob("*/manifest.json"))


def test_a_name_of_batchlooms_own_is_refused(write_workload: Callable[..., str]) -> None:
    path = write_workload("select 1", '"urgency"', '"row_id"')
    with pytest.raises(WorkloadError, match="priority may not use the column name 'row_id'"):
        load_workload(path)


def test_requests_carry_priority_and_the_length_that_is_expected(write_workload: Callable[..., str]) -> None:
    prompts = [np.array([5, 6], np.int32), np.array([7], np.int32)]
    form = RequestForm.of(load_workload(write_workload("select 1")), None, 3)
    plan, _ = plan_prompts(prompts, row_id=np.array([9, 8]), priority=np.array([2**60, -1]))
    requests = form.ask(plan)
    found = [(each.request_id, each.priority, each.expected_output_tokens, each.max_new_tokens) for each in requests]
    assert found == [("8", -1, 3, 4), ("9", 2**60, 3, 4)]
