"""One partition of the plan to parts of the answers: by the engine of this process, of another one, or on Ray."""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.partitions.attempt import Failure, StoppedError, check_other_rows, try_rows
from tasks.partitions.engine_host import PROCESS_HOST
from tasks.partitions.part import error_batch
from tasks.partitions.partition_work import AttemptLog, PartitionWork, Pieces
from tasks.runs.infer_job import InferJob
from tasks.storage.artifact import ArtifactRef
from tasks.storage.plan_file import read_partition
from tasks.workers.worker_pool import WorkerPool

LOGGER = logging.getLogger("batchloom")

ENDED = Failure(reason="the process that tried it ended each time")


@task(name="infer", retries=0, cache_policy=NO_CACHE, persist_result=False, task_run_name="infer-{partition}")
def infer(partition: int, job: InferJob) -> list[ArtifactRef] | None:
    """Answer one partition: write step records and parts, see `PartitionWork`; return the parts' references.

    Rows that are in a part already are not answered again. None where the run was asked to stop. Raises what
    `answer_partition` raises.
    """
    return infer_partition(partition, job)


@task(name="infer", retries=0, cache_policy=NO_CACHE, persist_result=False, task_run_name="infer-{partition}")
def infer_in_pool(partition: int, job: InferJob, pool: WorkerPool) -> list[ArtifactRef] | None:
    """As `infer`, by a process of the pool; raises what `WorkerPool.answer` raises."""
    with job.stop.make_on_error():
        return pool.answer(partition, job)


@task(name="infer", retries=0, cache_policy=NO_CACHE, persist_result=False, task_run_name="infer-{partition}")
def infer_on_ray(partition: int, job: InferJob) -> list[ArtifactRef] | None:
    """As `infer`, by a worker of a Ray cluster, on the GPU that it was given, if any.

    Ray runs it again where its worker has died. Raises what `infer` raises, and `WorkerError` where one worker after
    the other dies before it tries a row.
    """
    import ray

    from tasks.runs.run_exchange import run_at_hand

    with run_at_hand(partition, job) as (here, upload_file), here.stop.make_on_error():
        AttemptLog(here.run_folder, partition, upload_file).note_start()
        gpu_ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        if gpu_ids:
            device = name_device(gpu_ids[0], os.environ.get("CUDA_VISIBLE_DEVICES"))
            here = replace(here, engine=replace(here.engine, device=device))
        return infer_partition(partition, here, upload_file)


def infer_partition(
    partition: int, job: InferJob, upload_file: Callable[[Path], None] = lambda path: None
) -> list[ArtifactRef] | None:
    """`infer` without Prefect; `upload_file` gets each changed file that other processes need."""
    with job.stop.make_on_error():  # else the next partition would begin before the flow hears of it
        work = PartitionWork(job.run_folder, partition, upload_file)
        try:
            answer_partition(partition, job, work, AttemptLog(job.run_folder, partition, upload_file))
        except StoppedError:
            return None
    return work.parts


def answer_partition(partition: int, job: InferJob, work: PartitionWork, attempts: AttemptLog) -> None:
    """Try the partition's rows until each is in `work`, with an answer or an error.

    Where the model fails, what it had answered is kept; the rest is tried again after a while, then split in two until
    the rows that fail are found, and these become error rows. Where memory runs out, the model is loaded again with
    less.

    Raises:
        StoppedError: the run was asked to stop.
        ArtifactError: the plan is not what its reference says, or the run folder cannot be written.
        ModelError, CapacityError: the model cannot be loaded.
        DeviceError: the device does not work any more.
        FailureRateError: so many rows fail, here and elsewhere in the plan, that it is hardly for what is in them.
    """
    policy, stop, workload = job.failures, job.stop, job.workload
    pieces = Pieces(read_partition(job.plan, partition))
    where = f"{workload.name}, partition {partition}"
    todo, num_failures = [pieces.whole], 0
    while todo:
        piece = todo.pop()
        prompts = pieces.find_prompts(piece, work.answered)
        if not len(prompts):
            continue
        if stop.is_made:
            raise StoppedError
        rows, num_earlier, failure = pieces.select(piece, work.answered), attempts.count(piece), None
        # A piece between the whole and a single prompt is split at once: what ended its process is in one half.
        most_earlier = 0 if piece != pieces.whole and len(prompts) > 1 else policy.retries
        if num_earlier <= most_earlier:
            failure = try_rows(rows, job, work, on_begin=partial(attempts.note, piece))
            if failure is None:
                continue
            if failure.is_out_of_memory and PROCESS_HOST.lower_memory():
                attempts.forget(piece)
                todo.append(piece)
                continue
        reason = (failure or ENDED).reason
        num_failures += 1
        if num_failures == policy.error_rate_rows:
            check_other_rows(job)
        if piece == pieces.whole and num_earlier < policy.retries:
            delay_seconds = policy.delay_seconds(num_earlier + 1)
            LOGGER.warning("%s: trying again in %g s: %s", where, delay_seconds, reason)
            if stop.wait(delay_seconds):
                raise StoppedError
            todo.append(piece)
        elif len(prompts) > 1:
            todo += reversed(pieces.split(prompts))
        else:
            work.keep(error_batch(rows, reason))
    if work.num_failed:
        LOGGER.warning("%s: %s rows failed", where, f"{work.num_failed:,}")


def name_device(gpu_id: str, visible: str | None) -> str:
    """A GPU as torch names it, by its place among those that the process sees.

    A worker sees all GPUs of its host, since Ray may give it another one for the next partition, and a process cannot
    change what it sees once it has used a GPU.

    Args:
        visible: CUDA_VISIBLE_DEVICES; None where it is not set.
    """
    return f"cuda:{gpu_id if visible is None else [one.strip() for one in visible.split(',')].index(gpu_id)}"
