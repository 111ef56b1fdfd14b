"""Partitions handed out while there is time."""

import threading
from collections.abc import Sequence
from typing import Any

from prefect import Task
from prefect.futures import PrefectFutureList
from prefect.task_runners import ThreadPoolTaskRunner

Futures = PrefectFutureList[Any]


def submit_in_time(
    threads: ThreadPoolTaskRunner[Any],
    task: Task[..., Any],
    dispatch_order: Sequence[int],
    given: dict[str, Any],
    num_engines: int,
) -> Futures:
    """A task for each partition, begun only when an engine is free and the job's deadline has not come.

    Args:
        threads: where the tasks run.
        task: takes `partition` and what is `given`, the job among it.
        dispatch_order: the partitions.
        num_engines: partitions under way at a time.
    """
    free = threading.Semaphore(num_engines)
    futures: Futures = PrefectFutureList()  # type: ignore[abstract]
    for partition in dispatch_order:
        free.acquire()
        if given["job"].stop.is_made:
            break
        future = threads.submit(task, {"partition": partition, **given})
        future.add_done_callback(lambda _: free.release())
        futures.append(future)
    return futures
