"""Counts that workers leave and a watcher shows."""

import logging
import math
import threading
import time
from pathlib import Path

import pytest

from engine.execution.step_record import StepRecord
from tasks.runs.progress import Counts, PartitionProgress, PlannedWork, TimeLeft, read_counts, watch_progress


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


def work(num_rows: int) -> PlannedWork:
    return PlannedWork(num_rows=num_rows, num_prompt_tokens=100 * num_rows, answer_tokens=20)


def test_counts_of_all_partitions_add_up(tmp_path: Path) -> None:
    assert read_counts(tmp_path) == Counts(num_rows=0, num_tokens=0)
    first, second = PartitionProgress(tmp_path, 0), PartitionProgress(tmp_path, 1)
    first.add(step(2, 100))
    second.add(step(1, 50))
    assert read_counts(tmp_path) == Counts(num_rows=3, num_tokens=150, num_decode_tokens=146)
    first.add(step(1, 10))
    first.settle(7, 2)
    assert read_counts(tmp_path) == Counts(num_rows=8, num_failed=2, num_tokens=160, num_decode_tokens=154)
    first.add(step(1, 10))
    first.settle(7, 3)
    assert read_counts(tmp_path) == Counts(num_rows=8, num_failed=3, num_tokens=170, num_decode_tokens=162)
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
    assert read_counts(tmp_path) == Counts(num_rows=22, num_tokens=220, num_decode_tokens=176)


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


def test_without_a_terminal_there_are_log_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.runs.progress.LOG_SECONDS", 0.1)
    progress, shown = PartitionProgress(tmp_path, 0), list[int]()
    with caplog.at_level(logging.INFO, "batchloom"), watch_progress(tmp_path, "snippets", work(1200), shown.append):
        time.sleep(0.15)
        progress.add(step(300, 12_345))
        time.sleep(0.15)
        progress.add(step(0, 55))
        progress.settle(300, 40)
        time.sleep(0.15)
    lines = [record.message for record in caplog.records]
    assert lines[0] == "snippets: 0 of 1,200 prompts, the model is loaded, or computes its first step; 0 s so far"
    of_one_step = [line for line in lines if line.startswith("snippets: 300 of 1,200 prompts, 12,345 tokens, ")]
    assert of_one_step
    assert all(line.endswith(" tokens/s") for line in of_one_step), "one step says nothing about the time left"
    assert lines[-1].startswith("snippets: 300 of 1,200 prompts (40 failed), 12,400 tokens, ")
    assert lines[-1].endswith(" s left")
    assert (shown[0], shown[-1]) == (0, 300)


def test_an_error_in_the_block_ends_the_watch_and_comes_through(tmp_path: Path) -> None:
    num_threads = threading.active_count()

    def fail() -> None:
        with watch_progress(tmp_path, "snippets", work(10), lambda num_rows: None):
            assert threading.active_count() == num_threads + 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert threading.active_count() == num_threads


@pytest.mark.parametrize("expected_answer", [48, 200], ids=["answers as long as expected", "four times shorter"])
@pytest.mark.parametrize("loading_seconds", [0.0, 40.0])
def test_the_time_left_is_right_from_the_first_line_on(expected_answer: int, loading_seconds: float) -> None:
    """Rows finish late in a night that computes its prompts first: their number says little about the time left."""
    num_rows, prompt_tokens, answer_tokens, step_tokens, step_seconds = 400, 200, 48, 512, 0.75
    plan = PlannedWork(num_rows=num_rows, num_prompt_tokens=num_rows * prompt_tokens, answer_tokens=expected_answer)
    total = num_rows * (prompt_tokens + answer_tokens)
    night_seconds = loading_seconds + step_seconds * total / step_tokens
    time_left, estimates = TimeLeft(plan), []
    for now in range(1, int(night_seconds)):
        done = min(total, int(max(0.0, now - loading_seconds) / step_seconds) * step_tokens)
        num_decode = max(0, done - num_rows * prompt_tokens * 3 // 4) // 2 if done < total else num_rows * answer_tokens
        num_decode = max(num_decode, done - num_rows * prompt_tokens)
        counts = Counts(num_rows=num_decode // answer_tokens, num_tokens=done, num_decode_tokens=num_decode)
        left = time_left.update(counts, float(now))
        if now % 15 == 0 and now > loading_seconds + 2:
            estimates.append((left, night_seconds - now))
    assert len(estimates) >= 9
    bound = 1.5 if expected_answer == answer_tokens else 2.6  # until the first answers end, only a guess is known
    for left, truth in estimates:
        assert truth / bound <= left <= truth * bound, estimates


def test_the_first_tokens_predict_nothing() -> None:
    """They come in one lump, however long the step took that computed them."""
    time_left = TimeLeft(PlannedWork(num_rows=100, num_prompt_tokens=10_000, answer_tokens=0))
    assert math.isnan(time_left.update(Counts(), 20.0))
    assert math.isnan(time_left.update(Counts(num_tokens=2_000), 20.5))
    assert math.isnan(time_left.update(Counts(num_tokens=2_000), 21.0))
    assert time_left.update(Counts(num_tokens=4_000), 24.5) == pytest.approx(12.0)
    assert time_left.update(Counts(num_rows=100, num_tokens=10_000), 30.0) == 0.0
