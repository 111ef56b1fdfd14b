"""The task `infer` on a Ray cluster."""

import os
from dataclasses import replace

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.partitions.attempt import infer_partition
from tasks.partitions.partition_work import AttemptLog
from tasks.runs.infer_job import InferJob
from tasks.runs.run_exchange import local_job
from tasks.storage.artifact import ArtifactRef
from tasks.workers.starts import note_start


@task(name="infer", retries=0, cache_policy=NO_CACHE, persist_result=False, task_run_name="infer-{partition}")
def infer_on_ray(partition: int, job: InferJob) -> list[ArtifactRef] | None:
    """As `infer`, by a worker of a Ray cluster, on the GPU that Ray assigned to it, if any. Ray runs the task again if
    its worker dies; raises `WorkerError` if several in a row die before they try a row."""
    import ray

    with local_job(partition, job) as (here, upload_file), here.stop.make_on_error():
        note_start(AttemptLog(here.first.run_folder, partition, upload_file))
        gpu_ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        if gpu_ids:
            device = name_device(gpu_ids[0], os.environ.get("CUDA_VISIBLE_DEVICES"))
            here = replace(here, engine=replace(here.engine, device=device))
        return infer_partition(partition, here, upload_file)


def name_device(gpu_id: str, visible: str | None) -> str:
    """The torch name of a GPU, which is its index among the GPUs that the process sees, by CUDA_VISIBLE_DEVICES. A
    worker sees all GPUs of its host: Ray may assign another one for the next partition, and a process cannot change
    what it sees once it has used a GPU."""
    return f"cuda:{gpu_id if visible is None else [one.strip() for one in visible.split(',')].index(gpu_id)}"
