"""What a worker is told: the same for all partitions of a run."""

from dataclasses import dataclass

from engine.config import EngineConfig
from tasks.storage.artifact import ArtifactRef
from tasks.workloads.failure_policy import FailurePolicy
from tasks.workloads.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """How workers that do not see the run's folder come by their work, and hand it in.

    Attributes:
        url: of the run's folder in the store that all hosts reach, see `ObjectStore`.
        model: as the user named it; each host finds its own copy by it.
    """

    url: str
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InferJob:
    """What all partitions of a run have in common.

    Attributes:
        run_folder: where parts and step records go.
        checkpoint: the model's folder.
        model_digest: of its content; another content is loaded anew.
        failures: what to do about rows that the model fails on.
        expected_output_tokens: of an answer, see `AnswerLength`.
        exchange: None where workers see run folder, plan and checkpoint under the paths above.
    """

    run_folder: str
    plan: ArtifactRef
    workload: Workload
    checkpoint: str
    model_digest: str
    engine: EngineConfig
    failures: FailurePolicy
    expected_output_tokens: int | None
    exchange: Exchange | None = None
