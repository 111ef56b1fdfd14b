"""Nights with a deadline submit their partitions one by one."""

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from prefect.futures import PrefectFutureList
from prefect.task_runners import ThreadPoolTaskRunner

from tasks.infer import infer
from tasks.nights.pace import Pace

Futures = PrefectFutureList[Any]


def submit_in_time(
    threads: ThreadPoolTaskRunner[Any],
    dispatch_order: Sequence[int],
    given: dict[str, Any],
    num_engines: int,
    pace: Pace | None,
) -> Futures:
    """One task `infer` per partition, submitted when an engine is free, until the job is asked to stop.

    Args:
        threads: runs the tasks.
        dispatch_order: the partitions.
        given: the other arguments of `infer`, one of which is the job.
        num_engines: number of partitions that run at a time.
        pace: notes when partitions begin and end; None if nothing was forecast.
    """
    free, stop = threading.Semaphore(num_engines), given["job"].stop

    def end(partition: int, _: Any) -> None:
        """Note the time of a partition that was not stopped half-way, and free its engine."""
        try:
            if pace is not None and not stop.is_made:
                pace.end(partition, time.time())
        finally:
            free.release()

    futures: Futures = PrefectFutureList()  # type: ignore[abstract]
    for partition in dispatch_order:
        free.acquire()
        if stop.is_made:
            break
        if pace is not None:
            pace.begin(partition, time.time())
        future = threads.submit(infer, {"partition": partition, **given})
        future.add_done_callback(partial(end, partition))
        futures.append(future)
    return futures
