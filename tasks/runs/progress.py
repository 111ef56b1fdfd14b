"""How far a run is: workers leave counts in the run folder, one watcher shows them, in whatever process each is."""

import json
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engine.errors import ArtifactError
from engine.execution.step_record import StepRecord
from tasks.database.connection import describe_write_error

LOGGER = logging.getLogger("batchloom")

WRITE_SECONDS = 0.25
SHOW_SECONDS = 0.5
LOG_SECONDS = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What is done so far: rows answered, those that failed among them, and tokens that went through the model."""

    num_rows: int = 0
    num_failed: int = 0
    num_tokens: int = 0


class PartitionProgress:
    """A worker's side: the counts of one partition, left in ``progress/`` of the run folder a few times a second."""

    __slots__ = ("_num_failed", "_num_rows", "_num_tokens", "_path", "_written_at")

    def __init__(self, run_folder: Path, partition: int) -> None:
        self._path = run_folder / "progress" / f"part-{partition:05d}.json"
        self._num_rows = self._num_failed = self._num_tokens = 0
        self._written_at = 0.0

    def add(self, step: StepRecord) -> None:
        """Count one step of the engine."""
        self._num_rows += step.num_finished_requests
        self._num_tokens += step.num_tokens
        if time.monotonic() - self._written_at >= WRITE_SECONDS:
            self._write()

    def settle(self, num_rows: int, num_failed: int = 0) -> None:
        """So many of the partition's rows are on disk, failed ones included; steps count from here on."""
        self._num_rows, self._num_failed = num_rows, num_failed
        self._write()

    def _write(self) -> None:
        self._written_at = time.monotonic()
        temporary = self._path.with_suffix(".tmp")
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            temporary.write_text(json.dumps([self._num_rows, self._num_failed, self._num_tokens]))
            temporary.replace(self._path)
        except OSError as error:
            raise ArtifactError(describe_write_error(self._path, error)) from error


def read_counts(run_folder: str | Path) -> Counts:
    """The sum over all partitions that have begun."""
    counts = [json.loads(path.read_text()) for path in Path(run_folder).glob("progress/part-*.json")]
    num_rows, num_failed, num_tokens = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0, 0)
    return Counts(num_rows=num_rows, num_failed=num_failed, num_tokens=num_tokens)


@contextmanager
def watch_progress(
    run_folder: str | Path,
    title: str,
    num_rows: int,
    stream: IO[str] | None = None,
    log_seconds: float = LOG_SECONDS,
    show: Callable[[int], None] | None = None,
) -> Iterator[None]:
    """Show how far a run is for the length of the block: a bar on a terminal, else a log line now and then.

    Args:
        title: in front of each line.
        num_rows: that the workers will answer.
        stream: where a bar goes, if it is a terminal; standard error if None.
        log_seconds: between two log lines.
        show: is told the rows done, with each log line and at the end.
    """
    console = Console(file=stream or sys.stderr)
    has_ended = threading.Event()
    log = partial(_log, log_seconds=log_seconds, show=show)
    watch = partial(_draw, console=console) if console.is_terminal else log
    context = copy_context()  # so that log lines find the flow run they belong to
    arguments = (watch, Path(run_folder), title, num_rows, has_ended)
    thread = threading.Thread(target=context.run, args=arguments, daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
        if show is not None:
            show(read_counts(run_folder).num_rows)


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
            shown = f"{title} ({counts.num_failed:,} failed)" if counts.num_failed else title
            bar.update(task, description=shown, completed=counts.num_rows, tokens=counts.num_tokens, rate=rate)


def _log(
    run_folder: Path,
    title: str,
    num_rows: int,
    has_ended: threading.Event,
    log_seconds: float,
    show: Callable[[int], None] | None,
) -> None:
    started = time.monotonic()
    while not has_ended.wait(log_seconds):
        counts, seconds = read_counts(run_folder), time.monotonic() - started
        left = seconds * (num_rows - counts.num_rows) / counts.num_rows if counts.num_rows else math.nan
        LOGGER.info(
            "%s: %s of %s rows%s, %s tokens, %.0f tokens/s, %s",
            title,
            f"{counts.num_rows:,}",
            f"{num_rows:,}",
            f" ({counts.num_failed:,} failed)" if counts.num_failed else "",
            f"{counts.num_tokens:,}",
            counts.num_tokens / seconds,
            f"about {left:,.0f} s left" if counts.num_rows else "time left not known yet",
        )
        if show is not None:
            show(counts.num_rows)
