"""The source of a flow run whose model is not there, and jobs for its partitions, for tests that run stages by hand."""

from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.model.loading.checkpoint import checkpoint_digest
from tasks.runs.infer_job import FailurePolicy, InferJob, JobMember
from tasks.runs.source import Source
from tasks.storage.artifact import ArtifactRef
from tasks.workloads.workload import Workload


def make_source(database: str | Path, model_digest: str = "digest", **given: Any) -> Source:
    """A source of rows of a database, for a model with this digest."""
    whole = {"model": "tiny", "checkpoint": Path("/nowhere"), "max_model_len": 1024, **given}
    return Source(database=Path(database), model_digest=model_digest, **whole)


def make_job(run_folder: str | Path, workload: Workload, checkpoint: str | Path, **given: Any) -> InferJob:
    """A job for the plan of one workload; without a plan it is for its model alone."""
    whole = {
        "plan": ArtifactRef(path="", num_rows=0, digest=""),
        "model_digest": checkpoint_digest(found) if (found := Path(checkpoint)).is_dir() else "digest",
        "engine": EngineConfig(dtype="float32", kv_memory_bytes=8 << 20),
        "failures": FailurePolicy(),
        **given,
    }
    member = JobMember(run_folder=Path(run_folder), workload=workload)
    return InferJob(members=(member,), checkpoint=str(checkpoint), **whole)
