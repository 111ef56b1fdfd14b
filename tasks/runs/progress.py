"""How far a run is: workers leave counts in the run folder, one watcher shows them, in whatever process each is."""

import json
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from rich.console import Console

from engine.errors import ArtifactError
from engine.execution.step_record import StepRecord
from tasks.database.messages import describe_write_error

LOGGER = logging.getLogger("batchloom")

WRITE_SECONDS = 0.25
SHOW_SECONDS = 0.5
LOG_SECONDS = 15.0
HALF_LIFE_SECONDS = 60.0
"""After which a step weighs half as much in the rate that predicts the time left."""


class Counts(NamedTuple):
    """What is done so far."""

    num_rows: int = 0
    """Rows of the plan, which are prompts (a row of a table may have several): answered, failed ones included."""
    num_failed: int = 0
    num_tokens: int = 0
    """Tokens that went through the model."""
    num_decode_tokens: int = 0
    """Those of them that belong to answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWork:
    """What a run has to do: rows, their prompt tokens after sharing, and the decode tokens expected of an answer."""

    num_rows: int
    num_prompt_tokens: int
    answer_tokens: float

    def count_tokens(self, counts: Counts) -> float:
        """Tokens of the whole run, as far as `counts` tell: answers that ended correct what was expected of them."""
        so_far = counts.num_decode_tokens
        length = min(self.answer_tokens, so_far / counts.num_rows) if counts.num_rows else self.answer_tokens
        return max(counts.num_tokens, self.num_prompt_tokens + max(so_far, length * self.num_rows))


class TimeLeft:
    """How long a run will take from here, by the rate of its latest tokens; loading the model does not count."""

    def __init__(self, work: PlannedWork) -> None:
        self._work = work
        self._seen: tuple[float, int] | None = None
        self._seconds = self._tokens = 0.0
        self._num_rates = 0

    def update(self, counts: Counts, now: float) -> float:
        """Seconds left at the time `now`, given what is done by then; NaN while too little is known."""
        if self._seen is None or not counts.num_tokens:
            self._seen = now, counts.num_tokens
        seconds, tokens = now - self._seen[0], counts.num_tokens - self._seen[1]
        if tokens:
            # The first step began before the last look without one: its rate only serves until there is a second.
            weight = 0.5 ** (seconds / HALF_LIFE_SECONDS) if self._num_rates > 1 else 0.0
            self._seconds, self._tokens = weight * self._seconds + seconds, weight * self._tokens + tokens
            self._seen = now, counts.num_tokens
            self._num_rates += 1
        if not self._num_rates:
            return math.nan
        if counts.num_rows >= self._work.num_rows:
            return 0.0
        return (self._work.count_tokens(counts) - counts.num_tokens) * self._seconds / self._tokens


Look = tuple[float, Counts, float]
"""Seconds since the start, what is done, seconds left."""


class PartitionProgress:
    """A worker's side: the counts of one partition, left in ``progress/`` of the run folder a few times a second."""

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
        """So many of the partition's rows are on disk, failed ones included; steps count from here on."""
        self._counts = self._counts._replace(num_rows=num_rows, num_failed=num_failed)
        self._write()

    def _write(self) -> None:
        self._written_at = time.monotonic()
        temporary = self._path.with_suffix(".tmp")
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            temporary.write_text(json.dumps(self._counts))
            temporary.replace(self._path)
        except OSError as error:
            raise ArtifactError(describe_write_error(self._path, error)) from error


def read_counts(run_folder: str | Path) -> Counts:
    """The sum over all partitions that have begun."""
    counts = [json.loads(path.read_text()) for path in Path(run_folder).glob("progress/part-*.json")]
    return Counts(*map(sum, zip(*counts, strict=True)))


@contextmanager
def watch_progress(
    run_folder: str | Path,
    title: str,
    work: PlannedWork,
    stream: IO[str] | None = None,
    log_seconds: float = LOG_SECONDS,
    show: Callable[[int], None] | None = None,
) -> Iterator[None]:
    """Show how far a run is for the length of the block: a bar on a terminal, else a log line now and then.

    Args:
        run_folder: where workers leave their counts.
        title: in front of each line.
        work: that the workers will do.
        stream: where a bar goes, if it is a terminal; standard error if None.
        log_seconds: between two log lines.
        show: is told the rows done, with each log line and at the end.
    """
    console = Console(file=stream or sys.stderr)
    has_ended = threading.Event()
    show = show or (lambda _: None)

    def watch() -> None:
        looks = _look(Path(run_folder), work, has_ended, min(SHOW_SECONDS, log_seconds))
        if console.is_terminal:
            from tasks.runs.progress_bar import draw  # most nights have no terminal

            draw(looks, title, work, console)
        else:
            _log(looks, title, work, log_seconds, show)

    context = copy_context()  # so that log lines find the flow run they belong to
    thread = threading.Thread(target=context.run, args=(watch,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
        show(read_counts(run_folder).num_rows)


def _look(run_folder: Path, work: PlannedWork, has_ended: threading.Event, seconds: float) -> Iterator[Look]:
    """Look every so many seconds, and once more at the end."""
    time_left, started = TimeLeft(work), time.monotonic()
    is_last = False
    while not is_last:
        is_last = has_ended.wait(seconds)
        counts, now = read_counts(run_folder), time.monotonic()
        yield now - started, counts, time_left.update(counts, now)


def _log(looks: Iterable[Look], title: str, work: PlannedWork, log_seconds: float, show: Callable[[int], None]) -> None:
    num_lines = 0
    for seconds, counts, left in looks:
        if seconds < (num_lines + 1) * log_seconds:
            continue
        num_lines = int(seconds / log_seconds)
        rows = f"{counts.num_rows:,} of {work.num_rows:,} prompts"
        failed = f" ({counts.num_failed:,} failed)" if counts.num_failed else ""
        tokens = f"{counts.num_tokens:,} tokens, {counts.num_tokens / seconds:.0f} tokens/s"
        rest = "time left not known yet" if math.isnan(left) else f"about {left:,.0f} s left"
        LOGGER.info("%s: %s%s, %s, %s", title, rows, failed, tokens, rest)
        show(counts.num_rows)
