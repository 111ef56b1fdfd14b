"""Answers one partition of the plan, as a Prefect task."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.partitions.attempt import infer_partition
from tasks.runs.infer_job import InferJob
from tasks.storage.artifact import ArtifactRef


@task(name="infer", retries=0, cache_policy=NO_CACHE, persist_result=False, task_run_name="infer-{partition}")
def infer(partition: int, job: InferJob) -> list[ArtifactRef] | None:
    """See `infer_partition`."""
    return infer_partition(partition, job)
