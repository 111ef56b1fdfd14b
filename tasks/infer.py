"""One partition of the plan to parts of the answers: its rows are tried, tried again and split until each has an answer
or an error."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.partitions.attempt import Failure, StoppedError, try_rows
from tasks.partitions.joint import JointWork
from tasks.partitions.partition_work import AttemptLog, PartitionWork, Pieces
from tasks.runs.infer_job import InferJob
from tasks.storage.artifact import ArtifactRef
from tasks.storage.plan_file import read_partition

LOGGER = logging.getLogger("batchloom")

ENDED = Failure(reason="the process that tried it ended each time")


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
        run_folder = job.run_folder
        work = JointWork(job, partition) if job.members else PartitionWork(run_folder, partition, upload_file)
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
    pieces = Pieces(read_partition(job.plan, partition))
    todo, failing = [pieces.whole], None
    while todo:
        piece = todo.pop()
        prompts = pieces.find_prompts(piece, work.answered)
        if not len(prompts):
            continue
        if job.stop.is_made:
            raise StoppedError
        rows, num_earlier, failure = pieces.select(piece, work.answered), attempts.count(piece), None
        # A piece between the whole and a single prompt is split at once: what ended its process is in one half.
        most_earlier = 0 if piece != pieces.whole and len(prompts) > 1 else job.failures.retries
        if num_earlier <= most_earlier:
            failure = try_rows(rows, job, work, on_begin=partial(attempts.note, piece))
            if failure is None:
                continue
        if failing is None:
            from tasks.partitions.failing import FailingRows  # most partitions come through

            failing = FailingRows(partition, job, work, attempts, pieces)
        todo += failing.find_next(piece, prompts, num_earlier, failure or ENDED)
    if work.num_failed:
        LOGGER.warning("%s, partition %s: %s rows failed", job.workload.name, partition, f"{work.num_failed:,}")
