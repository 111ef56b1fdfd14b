"""Counts the processes that take a partition and end before they try a row of it."""

from engine.errors import WorkerError
from tasks.partitions.partition_work import AttemptLog

MOST_STARTS = 4
"""Most processes in a row that may die with a partition before they try a row of it."""


def note_start(attempts: AttemptLog) -> None:
    """Count a process that takes the partition. Raises `WorkerError` if too many in a row have ended since the last
    attempt was noted, so that rows are not the cause."""
    if attempts.write(attempts.starts, "ab", b".") > MOST_STARTS:
        raise WorkerError(
            f"partition {attempts.partition}: {MOST_STARTS} processes in a row ended before they tried a row; "
            "do they have the memory that the model takes?"
        )
