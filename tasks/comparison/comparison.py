"""The result of comparing two workloads."""

from dataclasses import dataclass

from tasks.comparison.difference import Difference
from tasks.comparison.paired_rows import PairedRow
from tasks.evaluation.evaluation import Metric
from tasks.forecast.sampled import SampledForecast
from tasks.storage.artifact import ArtifactRef
from tasks.storage.plan_file import read_plan_summary


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDiff:
    """Two workloads on the same rows.

    Attributes:
        names: of the first and the second workload.
        gold: the table of expected values; empty for none.
        rows: of the sample, with both answers; empty if the second workload has no rows.
        agreements: of both answers, by column.
        differences: of metrics against gold.
        num_tokens_together: prompt tokens that one batch of both computes.
        num_tokens_apart: prompt tokens that a batch of each would compute.
        forecast: for all rows of the second workload; None if the model's cost on the device is not known.
    """

    names: tuple[str, str]
    gold: str = ""
    rows: tuple[PairedRow, ...] = ()
    agreements: tuple[Metric, ...] = ()
    differences: tuple[Difference, ...] = ()
    num_tokens_together: int = 0
    num_tokens_apart: int = 0
    forecast: SampledForecast | None = None

    @property
    def changed(self) -> list[PairedRow]:
        """Rows with different answers."""
        return [row for row in self.rows if row.is_changed]


def count_computed(plan: ArtifactRef) -> int:
    """Prompt tokens that the plan computes; `ArtifactError` if the file is not what its reference says."""
    return read_plan_summary(plan).sharing.num_processed_tokens
