"""Answers one partition of the plan, as a Prefect task."""

from collections.abc import Callable

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.partitions.attempt import infer_partition
from tasks.runs.infer_job import InferJob
from tasks.storage.artifact import ArtifactRef

Answer = Callable[[int, InferJob], list[ArtifactRef] | None]


@task(name="infer", retries=0, cache_policy=NO_CACHE, persist_result=False, task_run_name="infer-{partition}")
def infer(partition: int, job: InferJob, answer: Answer = infer_partition) -> list[ArtifactRef] | None:
    """Answer a partition in this process, or as `answer` does, such as `WorkerPool.answer`. See `infer_partition`."""
    with job.stop.make_on_error():
        return answer(partition, job)
