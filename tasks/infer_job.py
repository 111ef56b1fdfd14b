"""What a worker is told: the same for all partitions of a run."""

from dataclasses import dataclass

from engine.config import EngineConfig
from tasks.artifact import ArtifactRef
from tasks.failure_policy import FailurePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class InferJob:
    """What all partitions of a run have in common.

    Attributes:
        run_folder: where parts and step records go.
        checkpoint: the model's folder.
        model_digest: of its content; another content is loaded anew.
        failures: what to do about rows that the model fails on.
        expected_output_tokens: of an answer, see `AnswerLength`.
    """

    run_folder: str
    plan: ArtifactRef
    workload_source: str
    checkpoint: str
    model_digest: str
    engine: EngineConfig
    failures: FailurePolicy
    expected_output_tokens: int | None
