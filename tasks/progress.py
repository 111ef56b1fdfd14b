"""How far a run is: workers leave counts in the run folder, one watcher shows them, in whatever process each is."""

import json
import logging
import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engine.step_record import StepRecord

LOGGER = logging.getLogger("batchloom")

WRITE_SECONDS = 0.25
SHOW_SECONDS = 0.5
LOG_SECONDS = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What is done so far: rows answered, tokens that went through the model."""

    num_rows: int = 0
    num_tokens: int = 0


class PartitionProgress:
    """A worker's side: the counts of one partition, left in ``progress/`` of the run folder a few times a second."""

    __slots__ = ("_num_rows", "_num_tokens", "_path", "_written_at")

    def __init__(self, run_folder: Path, partition: int) -> None:
        self._path = run_folder / "progress" / f"part-{partition:05d}.json"
        self._num_rows = self._num_tokens = 0
        self._written_at = 0.0

    def add(self, step: StepRecord) -> None:
        """Count one step of the engine."""
        self._num_rows += step.num_finished_requests
        self._num_tokens += step.num_tokens
        if time.monotonic() - self._written_at >= WRITE_SECONDS:
            self._write()

    def finish(self, num_rows: int) -> None:
        """The partition's part is whole, with so many rows."""
        self._num_rows = num_rows
        self._write()

    def _write(self) -> None:
        self._written_at = time.monotonic()
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps([self._num_rows, self._num_tokens]))
        temporary.replace(self._path)


def read_counts(run_folder: str | Path) -> Counts:
    """The sum over all partitions that have begun."""
    counts = [json.loads(path.read_text()) for path in Path(run_folder).glob("progress/part-*.json")]
    return Counts(num_rows=sum(rows for rows, _ in counts), num_tokens=sum(tokens for _, tokens in counts))


@contextmanager
def watch_progress(
    run_folder: str | Path, title: str, num_rows: int, stream: IO[str] | None = None, log_seconds: float = LOG_SECONDS
) -> Iterator[None]:
    """Show how far a run is for the length of the block: a bar on a terminal, else a log line now and then.

    Args:
        title: in front of each line.
        num_rows: that the workers will answer.
        stream: where a bar goes, if it is a terminal; standard error if None.
        log_seconds: between two log lines.
    """
    console = Console(file=stream or sys.stderr)
    has_ended = threading.Event()
    watch = partial(_draw, console=console) if console.is_terminal else partial(_log, log_seconds=log_seconds)
    context = copy_context()  # so that log lines find the flow run they belong to
    arguments = (watch, Path(run_folder), title, num_rows, has_ended)
    thread = threading.Thread(target=context.run, args=arguments, daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def _draw(run_folder: Path, title: str, num_rows: int, has_ended: threading.Event, console: Console) -> None:
    columns = (  # within 80 characters for a million rows
        TextColumn("{task.description}"),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TextColumn("rows {task.fields[tokens]:,} tokens {task.fields[rate]:,.0f}/s"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    started = time.monotonic()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=num_rows, tokens=0, rate=0.0)
        is_last_look = False
        while not is_last_look:
            is_last_look = has_ended.wait(SHOW_SECONDS)
            counts = read_counts(run_folder)
            rate = counts.num_tokens / (time.monotonic() - started)
            bar.update(task, completed=counts.num_rows, tokens=counts.num_tokens, rate=rate)


def _log(run_folder: Path, title: str, num_rows: int, has_ended: threading.Event, log_seconds: float) -> None:
    started = time.monotonic()
    while not has_ended.wait(log_seconds):
        counts, seconds = read_counts(run_folder), time.monotonic() - started
        left = seconds * (num_rows - counts.num_rows) / counts.num_rows if counts.num_rows else math.nan
        LOGGER.info(
            "%s: %s of %s rows, %s tokens, %.0f tokens/s, %s",
            title,
            f"{counts.num_rows:,}",
            f"{num_rows:,}",
            f"{counts.num_tokens:,}",
            counts.num_tokens / seconds,
            f"about {left:,.0f} s left" if counts.num_rows else "time left not known yet",
        )
