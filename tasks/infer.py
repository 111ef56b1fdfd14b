"""One partition of the plan to parts of the answers, as a Prefect task."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.partitions.attempt import infer_partition
from tasks.runs.infer_job import InferJob
from tasks.storage.artifact import ArtifactRef


@task(name="infer", retries=0, cache_policy=NO_CACHE, persist_result=False, task_run_name="infer-{partition}")
def infer(partition: int, job: InferJob) -> list[ArtifactRef] | None:
    """Answer one partition: write step records and parts, see `PartitionWork`; return the parts' references.

    Rows that are in a part already are not answered again. None where the run was asked to stop. Raises what
    `answer_partition` raises.
    """
    return infer_partition(partition, job)
