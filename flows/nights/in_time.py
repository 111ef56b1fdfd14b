"""Models loaded and partitions handed out while there is time."""

import logging
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from prefect import Task
from prefect.futures import PrefectFutureList
from prefect.task_runners import ThreadPoolTaskRunner

from tasks.forecast.load_time import forecast_load
from tasks.nights.pace import Pace
from tasks.runs.infer_job import StopRequest

if TYPE_CHECKING:
    from flows.workload_run import Night

LOGGER = logging.getLogger("batchloom")

Futures = PrefectFutureList[Any]


def find_load_seconds(night: "Night", deadline: float, title: str) -> float | None:
    """How long the night's engines take until their first step, 0 where they are loaded; None where it is too long.

    Args:
        night: the engines, and the model that they load.
        deadline: Unix time.
        title: of the run, for the line that says that it is not begun.
    """
    if night.workers.are_loaded:
        return 0.0
    source = night.source
    seconds = forecast_load(source.database, source.checkpoint, source.model_digest, night.engine)
    if time.time() + seconds < deadline:
        return seconds
    LOGGER.warning("%s: not begun before the deadline, since its model takes %.0f s to load", title, seconds)
    return None


def submit_in_time(
    threads: ThreadPoolTaskRunner[Any],
    task: Task[..., Any],
    dispatch_order: Sequence[int],
    given: dict[str, Any],
    num_engines: int,
    pace: Pace | None,
) -> Futures:
    """A task for each partition, begun only when an engine is free and the job's deadline has not come.

    Args:
        threads: where the tasks run.
        task: takes `partition` and what is `given`, the job among it.
        dispatch_order: the partitions.
        num_engines: partitions under way at a time.
        pace: notes when partitions begin and end; None where nothing was forecast.
    """
    free = threading.Semaphore(num_engines)
    futures: Futures = PrefectFutureList()  # type: ignore[abstract]
    for partition in dispatch_order:
        free.acquire()
        if given["job"].stop.is_made:
            break
        if pace is not None:
            pace.begin(partition, time.time())
        future = threads.submit(task, {"partition": partition, **given})
        future.add_done_callback(partial(_end, partition, given["job"].stop, pace, free))
        futures.append(future)
    return futures


def _end(partition: int, stop: StopRequest, pace: Pace | None, free: threading.Semaphore, _: Any) -> None:
    """A partition that was not stopped in the middle has taken its whole time."""
    try:
        if pace is not None and not stop.is_made:
            pace.end(partition, time.time())
    finally:
        free.release()
