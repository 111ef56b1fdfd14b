"""Observes a night from outside, and acts at a given moment."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def find_workers(parent: int) -> list[int]:
    """Process ids of the worker processes of a process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            status = dict(
                line.split(":\t", 1) for line in (folder / "status").read_text().splitlines() if ":\t" in line
            )
            if int(status["PPid"]) == parent and b"tasks.workers.worker_process" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return sorted(found)


def find_processes(variable: str) -> list[int]:
    """Process ids by a setting in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def hold_worker(until: Callable[[], Any], is_killed: bool = True) -> None:
    """Stop the one worker of this process while it starts, and kill it when the condition holds, or leave it so."""
    (worker,) = wait_until(lambda: find_workers(os.getpid()))
    os.kill(worker, signal.SIGSTOP)
    wait_until(until)
    if is_killed:
        os.kill(worker, signal.SIGKILL)


@contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """Run `act` in a thread beside the block; what it raises fails the test."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()
    assert errors == []


def lose_step_records(runs: Path) -> None:
    """The folder of a run's step records goes away while the first part is there and others are not."""
    (part, *_) = wait_until(lambda: [*runs.glob("*/parts/part-00000.parquet")], pause_seconds=0.002)
    steps = part.parents[1] / "steps"
    steps.rename(steps.with_name("gone"))


def wait_until(condition: Callable[[], Any], seconds: float = 300.0, pause_seconds: float = 0.05) -> Any:
    """Short pauses only where what follows must come within a partition: each look may take milliseconds."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(pause_seconds)
    return found
