"""One partition of the plan to parts of the answers: all rows are tried at once, what is left by `FailingRows`."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.partitions.attempt import StoppedError, try_rows
from tasks.partitions.joint import JointWork
from tasks.partitions.partition_work import AttemptLog, PartitionWork
from tasks.partitions.pieces import Piece
from tasks.runs.infer_job import InferJob
from tasks.storage.artifact import ArtifactRef
from tasks.storage.plan_file import read_partition

LOGGER = logging.getLogger("batchloom")


@task(name="infer", retries=0, cache_policy=NO_CACHE, persist_result=False, task_run_name="infer-{partition}")
def infer(partition: int, job: InferJob) -> list[ArtifactRef] | None:
    """Answer one partition: write step records and parts, see `PartitionWork`; return the parts' references.

    Rows that are in a part already are not answered again. None where the run was asked to stop. Raises what
    `answer_partition` raises.
    """
    return infer_partition(partition, job)


def infer_partition(
    partition: int, job: InferJob, upload_file: Callable[[Path], None] = lambda path: None
) -> list[ArtifactRef] | None:
    """`infer` without Prefect; None where the run was asked to stop, but not by its deadline.

    Args:
        partition: its number in the plan.
        upload_file: gets each changed file that other processes need.
    """
    with job.stop.make_on_error():  # else the next partition would begin before the flow hears of it
        given = (partition, job.workload, upload_file)
        work = JointWork(job, partition) if job.members else PartitionWork(job.run_folder, *given)
        try:
            answer_partition(partition, job, work, AttemptLog(job.run_folder, partition, upload_file))
        except StoppedError:
            if not job.stop.is_overdue:
                return None
    return work.parts


def answer_partition(partition: int, job: InferJob, work: PartitionWork, attempts: AttemptLog) -> None:
    """Try the partition's rows until each is in `work`, with an answer or an error.

    Where the model fails, what it had answered is kept; the rest is tried again after a while, then split in two until
    the rows that fail are found, and these become error rows. Where memory runs out, the model is loaded again with
    less.

    Args:
        partition: its number in the plan.
        work: collects answers and errors as they come.
        attempts: counts how often each piece was tried, across processes; updated.
    Raises:
        StoppedError: the run was asked to stop.
        ArtifactError: the plan is not what its reference says, or the run folder cannot be written.
        ModelError, CapacityError: the model cannot be loaded.
        DeviceError: the device does not work any more.
        FailureRateError: so many rows fail, here and elsewhere in the plan, that it is hardly for what is in them.
    """
    rows = read_partition(job.plan, partition)
    left = rows.select(~np.isin(rows.row_id, work.answered))
    if left.num_rows:
        if job.stop.is_made:
            raise StoppedError
        whole = Piece(first=0, last=int(rows.is_member_start.sum()) - 1)
        has_ended, failure = attempts.count(whole) > 0, None
        if not has_ended:
            failure = try_rows(left, job, work, on_begin=partial(attempts.note, whole))
        if has_ended or failure is not None:
            from tasks.partitions.failing import FailingRows  # most partitions come through

            FailingRows(partition, job, work, attempts, rows).answer(failure)
    if work.num_failed:
        LOGGER.warning("%s, partition %s: %s rows failed", job.workload.name, partition, f"{work.num_failed:,}")
