"""The key ``cascade`` of a night file, and the columns of a workload's answers that a cascade uses."""

import math
from collections.abc import Sequence
from typing import Annotated, Self

import pydantic
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from engine.errors import ConfigError
from tasks.answers.decide import Decisions
from tasks.workloads.workload import Workload

SAMPLED_DISAGREEMENTS = 20
"""Expected disagreements in a sample at the target; with this many, the bound is near the target."""

Share = Annotated[float, Field(gt=0, lt=1)]


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Cascade:
    """The key ``cascade`` of a workload in a night file.

    Attributes:
        to: name of the model that answers the rows of which the workload's own model is unsure.
        below: rows whose answer has a lower probability are unsure. Alternatively:
        target_agreement, confidence: share of the other rows in which both models give the same answer, and with which
            confidence; the threshold is then chosen by a sample that both models answer.
        sample: rows that both models answer; None for as many as the target needs.
    """

    to: Annotated[str, Field(min_length=1)]
    below: Annotated[float, Field(gt=0, le=1)] | None = None
    target_agreement: Share | None = None
    confidence: Share = 0.95
    sample: Annotated[int, Field(ge=1)] | None = None

    @property
    def num_sampled(self) -> int:
        """Rows that both models answer; 0 if the threshold is given."""
        if self.target_agreement is None:
            return 0
        return self.sample or math.ceil(SAMPLED_DISAGREEMENTS / (1 - self.target_agreement) - 1e-9)

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if (self.below is None) == (self.target_agreement is None):
            raise ValueError("must have either below or target_agreement")
        if self.target_agreement is None:
            if self.sample is not None or self.confidence != 0.95:
                raise ValueError("sample and confidence belong to target_agreement")
            return self
        fewest = math.ceil(math.log(1 - self.confidence) / math.log(self.target_agreement) - 1e-9)
        if self.num_sampled < fewest:
            raise ValueError(
                f"a sample of {self.num_sampled:,} rows cannot show an agreement of {self.target_agreement:g} with "
                f"confidence {self.confidence:g}; {fewest:,} rows are the fewest that can"
            )
        return self


def find_probability_columns(workload: Workload) -> Sequence[str]:
    """Columns with the probabilities of answers, see ``cascade/macro_confidence_of``; else `ConfigError`."""
    kind, cannot = workload.kind, f"workload {workload.name!r} cannot have a cascade"
    if "label_logprobs" in kind.columns:
        return ["label_logprobs"]
    if not isinstance(kind, Decisions):
        why = f"answers of mode {kind.mode!r} have no probability; those of 'score' and 'decide' have"
        raise ConfigError(f"{cannot}: {why}")
    for name, columns in zip(kind.questions, kind.question_columns, strict=True):
        if len(columns) == 1:
            why = f"the answer to question {name!r} is an expectation, which has no probability"
            raise ConfigError(f"{cannot}: {why}; ask it in a workload of its own")
    return [column for columns in kind.question_columns for column in columns[1:]]


def find_answer_columns(workload: Workload) -> Sequence[str]:
    """Columns by which two models are compared; they agree on a row if all these columns are equal."""
    if isinstance(workload.kind, Decisions):
        return [columns[0] for columns in workload.kind.question_columns]
    return ["label"]
