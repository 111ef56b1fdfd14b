"""Progress of a run: each worker writes counts to the run folder, one watcher sums and shows them."""

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from engine.execution.step_record import StepRecord
from tasks.storage.artifact import writing

LOGGER = logging.getLogger("batchloom")

WRITE_SECONDS = 0.25
SHOW_SECONDS = 0.5
LOG_SECONDS = 15.0
HALF_LIFE_SECONDS = 60.0
"""Age at which a step counts half as much in the rate that predicts the time left."""


class Counts(NamedTuple):
    """What is done so far: finished prompts, failed ones included (a row of a table may have several prompts), tokens
    that went through the model, and of these, tokens of answers."""

    num_rows: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    num_decode_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWork:
    """The work of a run: rows, their prompt tokens after sharing, and the decode tokens expected of an answer."""

    num_rows: int
    num_prompt_tokens: int
    answer_tokens: float

    def count_tokens(self, counts: Counts) -> float:
        """Expected tokens of the whole run; shorter answers so far lower the expected length of the others."""
        so_far = counts.num_decode_tokens
        length = min(self.answer_tokens, so_far / counts.num_rows) if counts.num_rows else self.answer_tokens
        return max(counts.num_tokens, self.num_prompt_tokens + max(so_far, length * self.num_rows))


class TimeLeft:
    """Predicts the seconds left of a run from the rate of its latest tokens; loading the model is left out."""

    def __init__(self, work: PlannedWork) -> None:
        self._work = work
        self._seen = 0.0, 0
        self._seconds = self._tokens = 0.0

    def update(self, counts: Counts, now: float) -> float:
        """Seconds left at `now`, when `counts` is done; NaN before the second step, as nobody saw the first begin."""
        if counts.num_rows >= self._work.num_rows:
            return 0.0
        seconds, tokens = now - self._seen[0], counts.num_tokens - self._seen[1]
        if tokens > 0:  # fewer where a partition begins anew
            if self._seen[1]:
                weight = 0.5 ** (seconds / HALF_LIFE_SECONDS)
                self._seconds, self._tokens = weight * self._seconds + seconds, weight * self._tokens + tokens
            self._seen = now, counts.num_tokens
        if not self._tokens:
            return math.nan
        return (self._work.count_tokens(counts) - counts.num_tokens) * self._seconds / self._tokens


Look = tuple[float, Counts, float]
"""Seconds since the start, what is done, seconds left."""


class PartitionProgress:
    """A worker's counts of one partition, written to ``progress/`` of the run folder a few times a second."""

    def __init__(self, run_folder: Path, partition: int) -> None:
        self._path = run_folder / "progress" / f"part-{partition:05d}.json"
        self._counts = Counts()
        self._written_at = 0.0

    def add(self, step: StepRecord) -> None:
        """Count one step of the engine."""
        rows, failed, tokens, decode_tokens = self._counts
        rows, tokens = rows + step.num_finished_requests, tokens + step.num_tokens
        self._counts = Counts(rows, failed, tokens, decode_tokens + step.num_decode_tokens)
        if time.monotonic() - self._written_at >= WRITE_SECONDS:
            self._write()

    def settle(self, num_rows: int, num_failed: int = 0) -> None:
        """Set the numbers of rows that are on disk, failed ones included; later steps add to them."""
        self._counts = self._counts._replace(num_rows=num_rows, num_failed=num_failed)
        self._write()

    def _write(self) -> None:
        self._written_at = time.monotonic()
        temporary = self._path.with_suffix(".tmp")
        with writing(self._path):
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            temporary.write_text(json.dumps(self._counts))
            temporary.replace(self._path)


def read_counts(run_folder: Path) -> Counts:
    """The sum of the counts of all partitions that have begun."""
    counts = [json.loads(path.read_text()) for path in run_folder.glob("progress/part-*.json")]
    return Counts(*map(sum, zip(*counts, strict=True)))


@contextmanager
def watch_progress(run_folder: Path, title: str, work: PlannedWork, show: Callable[[int], None]) -> Iterator[None]:
    """Show the progress of a run during the block: a bar if standard error is a terminal, else log lines.

    Args:
        title: in front of each line.
        show: called with the number of finished rows, with each log line and at the end.
    """
    console = Console(stderr=True)
    has_ended = threading.Event()

    def watch() -> None:
        looks = _look(run_folder, work, has_ended, min(SHOW_SECONDS, LOG_SECONDS))
        if console.is_terminal:
            from tasks.runs.progress_bar import draw_bar  # imported only when needed

            draw_bar(looks, title, work, console)
        else:
            _log(looks, title, work, show)

    context = copy_context()  # log lines belong to the flow run of this context
    thread = threading.Thread(target=context.run, args=(watch,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
        show(read_counts(run_folder).num_rows)


def _look(run_folder: Path, work: PlannedWork, has_ended: threading.Event, seconds: float) -> Iterator[Look]:
    """Read the counts every `seconds`, and once more at the end."""
    time_left, started = TimeLeft(work), time.monotonic()
    is_last = False
    while not is_last:
        is_last = has_ended.wait(seconds)
        counts, now = read_counts(run_folder), time.monotonic()
        yield now - started, counts, time_left.update(counts, now)


def _log(looks: Iterable[Look], title: str, work: PlannedWork, show: Callable[[int], None]) -> None:
    num_lines = 0
    for seconds, counts, left in looks:
        if seconds < (num_lines + 1) * LOG_SECONDS:
            continue
        num_lines = int(seconds / LOG_SECONDS)
        rows = f"{counts.num_rows:,} of {work.num_rows:,} prompts"
        failed = f" ({counts.num_failed:,} failed)" if counts.num_failed else ""
        tokens = f"{counts.num_tokens:,} tokens, {counts.num_tokens / seconds:,.0f} tokens/s"
        if not counts.num_tokens:
            tokens = f"the model is loaded, or computes its first step; {seconds:,.0f} s so far"
        rest = "" if math.isnan(left) else f", about {left:,.0f} s left"
        LOGGER.info("%s: %s%s, %s%s", title, rows, failed, tokens, rest)
        show(counts.num_rows)
