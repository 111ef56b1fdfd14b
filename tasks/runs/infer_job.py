"""What a worker is told, the same for all partitions of a run; when it retries, gives up, or is asked to stop."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from engine.config import EngineConfig
from engine.errors import FailureRateError
from tasks.storage.artifact import ArtifactRef
from tasks.workloads.workload import Workload

if TYPE_CHECKING:
    from tasks.runs.run_exchange import Exchange

LOOK_SECONDS = 0.2

NUM_REASONS = 3
"""Of the reasons for failed rows, how many a message names."""


@dataclass(frozen=True, slots=True)
class StopRequest:
    """The file ``stop`` of a run folder, or a deadline. Workers look for it after each step of the engine.

    Attributes:
        run_folder: that all workers see.
        deadline: Unix time from which on the request is made; None for none.
    """

    run_folder: str | Path
    deadline: float | None = None

    @property
    def is_made(self) -> bool:
        return self.is_overdue or Path(self.run_folder, "stop").exists()

    @property
    def is_overdue(self) -> bool:
        """Whether the deadline has passed or will in the next step of an engine; the run then ends as planned."""
        return self.deadline is not None and (time.time() >= self.deadline or Path(self.run_folder, "overdue").exists())

    def has_time(self, step_seconds: float) -> bool:
        """Whether a step of this length may begin: none is asked to stop, and it would end before the deadline."""
        if self.deadline is not None and time.time() + step_seconds >= self.deadline:
            Path(self.run_folder, "overdue").touch(mode=0o600)
        return not self.is_made

    def wait(self, seconds: float) -> bool:
        """Sleep so long, or until a request is made; returns whether one is."""
        deadline = time.monotonic() + seconds
        while not self.is_made and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, LOOK_SECONDS))
        return self.is_made

    def make(self) -> None:
        """Ask the workers to end; what they have finished stays."""
        Path(self.run_folder, "stop").touch(mode=0o600)

    @contextmanager
    def make_on_error(self) -> Iterator[None]:
        """Ask the workers to end if the block does not come through."""
        try:
            yield
        except BaseException:
            self.make()
            raise


@pydantic_dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class FailurePolicy:
    """When the run tries again, and when it gives up.

    Rows that could not be tried, because the input is not usable, do not count as failed.
    """

    retries: Annotated[
        int,
        Field(ge=0, description="how often a partition is tried again before it is split to find failing rows"),
    ] = 2
    retry_delay_seconds: Annotated[
        float, Field(ge=0, description="seconds before the first retry; each further one waits twice as long")
    ] = 1.0
    max_error_rate: Annotated[
        float, Field(ge=0, le=1, description="share of the tried rows above which failed rows fail the run")
    ] = 0.5
    error_rate_rows: Annotated[int, Field(ge=1, description="fewest tried rows for max_error_rate to count")] = 20

    def check(self, reasons: Counter[str], num_rows: int) -> None:
        """Raise `FailureRateError` where too many of `num_rows` failed; `reasons` holds each failed row's."""
        num_failed = reasons.total()
        if num_rows < self.error_rate_rows or num_failed <= self.max_error_rate * num_rows:
            return
        common = "; ".join(f"{reason} ({count:,} rows)" for reason, count in reasons.most_common(NUM_REASONS))
        rest = len(reasons) - NUM_REASONS
        raise FailureRateError(
            f"{num_failed:,} of {num_rows:,} rows failed, max_error_rate allows {self.max_error_rate:.0%}: {common}"
            + (f"; and {rest:,} other reasons" if rest > 0 else "")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One of several workloads whose rows are in one plan.

    Attributes:
        run_folder: of its run, where its parts and step records go.
        first_row_id: that its first row has in the plan; the next member's rows follow.
        expected_output_tokens: of an answer, see `AnswerLength`.
    """

    run_folder: str
    workload: Workload
    first_row_id: int
    expected_output_tokens: int | None


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
        deadline: Unix time after which no step of the engine begins; None for none.
        keeps_base: whether the night answers with other adapters of the same model as well, see `Engine.load`.
        members: the workloads, where the plan holds rows of several; `workload` and `run_folder` are then the first's.
    """

    run_folder: str
    plan: ArtifactRef
    workload: Workload
    checkpoint: str
    model_digest: str
    engine: EngineConfig
    failures: FailurePolicy
    expected_output_tokens: int | None
    exchange: "Exchange | None" = None
    deadline: float | None = None
    members: tuple[Member, ...] = ()
    keeps_base: bool = False

    @property
    def title(self) -> str:
        """In the log, and of what shows the progress."""
        return " + ".join(member.workload.name for member in self.members) or self.workload.name

    @property
    def stop(self) -> StopRequest:
        """The run's request to stop."""
        return StopRequest(self.run_folder, self.deadline)
