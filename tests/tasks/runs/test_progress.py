"""Counts that workers leave and a watcher shows."""

import logging
import os
import threading
import time
from pathlib import Path

import pytest

from engine.execution.step_record import StepRecord
from tasks.runs.progress import Counts, PartitionProgress, read_counts, watch_progress


def step(num_finished: int, num_tokens: int) -> StepRecord:
    return StepRecord(
        step=0,
        num_decode_tokens=num_tokens - 2,
        num_suffix_tokens=1,
        num_prefix_tokens=1,
        num_kv_blocks_used=1,
        num_prefix_kv_blocks=1,
        num_request_kv_blocks=0,
        num_cached_kv_blocks=0,
        num_kv_blocks_total=2,
        num_running_requests=1,
        num_waiting_requests=0,
        num_finished_requests=num_finished,
        num_preempted_requests=0,
        duration_ms=1.0,
    )


def test_counts_of_all_partitions_add_up(tmp_path: Path) -> None:
    assert read_counts(tmp_path) == Counts(num_rows=0, num_tokens=0)
    first, second = PartitionProgress(tmp_path, 0), PartitionProgress(tmp_path, 1)
    first.add(step(2, 100))
    second.add(step(1, 50))
    assert read_counts(tmp_path) == Counts(num_rows=3, num_tokens=150)
    first.add(step(1, 10))
    first.settle(7, 2)
    assert read_counts(tmp_path) == Counts(num_rows=8, num_failed=2, num_tokens=160)
    first.add(step(1, 10))
    first.settle(7, 3)
    assert read_counts(tmp_path) == Counts(num_rows=8, num_failed=3, num_tokens=170)
    assert sorted(path.name for path in (tmp_path / "progress").iterdir()) == ["part-00000.json", "part-00001.json"]


def test_many_steps_write_now_and_then(tmp_path: Path) -> None:
    progress = PartitionProgress(tmp_path, 0)
    progress.add(step(1, 10))
    path = tmp_path / "progress" / "part-00000.json"
    written = path.stat().st_mtime_ns
    for _ in range(20):
        progress.add(step(1, 10))
    assert path.stat().st_mtime_ns == written
    time.sleep(0.3)
    progress.add(step(1, 10))
    assert read_counts(tmp_path) == Counts(num_rows=22, num_tokens=220)


def test_a_reader_never_meets_half_a_file(tmp_path: Path) -> None:
    progress = PartitionProgress(tmp_path, 0)
    progress.settle(0)
    has_ended = threading.Event()

    def write() -> None:
        for rows in range(3000):
            progress.settle(rows)
        has_ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    last = 0
    while not has_ended.is_set():
        counts = read_counts(tmp_path)
        assert counts.num_rows >= last
        last = counts.num_rows
    writer.join()


def test_without_a_terminal_there_are_log_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    progress = PartitionProgress(tmp_path, 0)
    with (
        caplog.at_level(logging.INFO, "batchloom"),
        open(os.devnull, "w") as nowhere,
        watch_progress(tmp_path, "snippets", 1200, nowhere, log_seconds=0.1),
    ):
        time.sleep(0.15)
        progress.add(step(300, 12_345))
        time.sleep(0.15)
        progress.settle(300, 40)
        time.sleep(0.15)
    lines = [record.message for record in caplog.records]
    assert lines[0] == "snippets: 0 of 1,200 rows, 0 tokens, 0 tokens/s, time left not known yet"
    assert any(line.startswith("snippets: 300 of 1,200 rows, 12,345 tokens, ") for line in lines)
    assert lines[-1].startswith("snippets: 300 of 1,200 rows (40 failed), 12,345 tokens, ")
    assert lines[-1].endswith(" s left")


def test_an_error_in_the_block_ends_the_watch_and_comes_through(tmp_path: Path) -> None:
    num_threads = threading.active_count()

    def fail() -> None:
        with open(os.devnull, "w") as nowhere, watch_progress(tmp_path, "snippets", 10, nowhere):
            assert threading.active_count() == num_threads + 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert threading.active_count() == num_threads
