"""The statements of docs/operating.md that delete answers, or look for failed ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.database.connection import connect
from tests.docs.test_docs import ROOT, read_blocks


def run_block(path: Path, name: str, time_zone: str) -> list[tuple[Any, ...]]:
    """Run the page's SQL of this name as a client in a time zone does; returns the rows of the last statement."""
    (block,) = read_blocks(ROOT / "docs" / "operating.md", f"sql {name}")
    with connect(path) as connection:
        connection.execute(f"set TimeZone = '{time_zone}'")
        return connection.execute(block).fetchall()


def test_one_nights_answers_are_deleted_in_any_time_zone(night: Any) -> None:
    for time, full in (("2026-11-20 02:00:00", False), ("2026-11-21 02:00:00", True)):
        run_id = night.run(full=full).record.run_id
        night.sql(f"update runs set started_at = '{time}+00' where run_id = ?", [run_id])
    run_block(night.path, "again", "America/New_York")
    assert night.sql("select distinct run_id from snippets") == [(run_id,)]
    night.sql("update runs set started_at = '2026-11-20 23:30:00+00'")
    run_block(night.path, "again", "Asia/Tokyo")
    assert night.sql("select count(*) from snippets") == [(0,)]
    assert night.prepare().read.num_selected == 3


def test_older_answers_count_again_where_newer_ones_are_deleted(night: Any) -> None:
    """A prompt is changed, then taken back: without this, its rows are answered again."""
    first = night.run()
    prompt = replace(first.workload.prompt, template="Please: " + first.workload.prompt.template)
    bad = night.prepare(replace(first.workload, prompt=prompt))
    bad.write()
    night.sql("update runs set started_at = '2026-11-20 02:00:00+00' where run_id = ?", [bad.record.run_id])
    assert night.prepare().read.num_selected == 3
    run_block(night.path, "again", "Asia/Tokyo")
    assert night.prepare().read.num_already_done == 3
    assert night.sql("select distinct run_id from latest_snippets") == [(first.record.run_id,)]


def test_old_answers_and_steps_can_be_deleted(night: Any) -> None:
    """The newest of each row and model stay, whatever their age; nothing is asked again."""
    night.run()
    night.run(full=True)
    night.sql("update documents set body = 'new' where doc_id = 'd1'")
    night.run()
    for table, column in (("snippets", "created_at"), ("runs", "started_at")):
        night.sql(f"update {table} set {column} = {column} - interval 91 days")
    night.sql("update snippets set model = 'other', created_at = created_at - interval 1 day where doc_id = 'd2'")
    night.run(full=True)
    before = night.sql("from latest_snippets order by all")
    assert night.sql("select count(*) from snippets") == [(11,)]
    run_block(night.path, "old", "Asia/Tokyo")
    assert night.sql("from latest_snippets order by all") == before
    assert night.sql("select doc_id, model, count(*) from snippets group by all order by all") == [
        ("d1", "tiny", 2),
        ("d2", "other", 1),
        ("d2", "tiny", 1),
    ]
    assert night.sql("select count(distinct run_id) from steps") == [(1,)]
    assert night.prepare().read.num_selected == 0


def test_the_errors_of_the_last_night_are_found(night: Any) -> None:
    night.sql("insert into documents values ('d3', 'Three', null)")
    night.sql("insert into snippet_requests values ('d3', 'q1')")
    night.run()
    night.sql("create view failed_triage as select * exclude (workload) from failed_rows")  # as of another workload
    assert run_block(night.path, "morning", "Asia/Tokyo") == [("invalid", "body is NULL", 1)]
