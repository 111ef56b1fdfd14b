"""Partitions handed out while there is time."""

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from prefect import Task
from prefect.futures import PrefectFutureList
from prefect.task_runners import ThreadPoolTaskRunner

from tasks.nights.pace import Pace
from tasks.runs.infer_job import StopRequest

Futures = PrefectFutureList[Any]


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
