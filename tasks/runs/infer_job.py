"""What workers are told of a run: the job, its failure policy, and the request to stop."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from engine.config import EngineConfig
from tasks.storage.artifact import ArtifactRef
from tasks.workloads.workload import Workload

LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class StopRequest:
    """A request to stop a run: the file ``stop`` in the folder that all workers see, or a deadline, the Unix time at
    which the run stops by itself. Workers check it after each step."""

    run_folder: Path
    deadline: float | None = None

    @property
    def is_made(self) -> bool:
        return self.is_overdue or (self.run_folder / "stop").exists()

    @property
    def is_overdue(self) -> bool:
        """Whether the deadline has passed, or a worker has found that its next step would not end before it."""
        return self.deadline is not None and (time.time() >= self.deadline or (self.run_folder / "overdue").exists())

    def has_time(self, step_seconds: float) -> bool:
        """Whether a step of this length may begin: nobody asked to stop, and it would end before the deadline."""
        if self.deadline is not None and time.time() + step_seconds >= self.deadline:
            (self.run_folder / "overdue").touch(mode=0o600)
        return not self.is_made

    def make(self) -> None:
        """Ask the workers to stop; finished answers stay."""
        (self.run_folder / "stop").touch(mode=0o600)

    @contextmanager
    def make_on_error(self) -> Iterator[None]:
        """Ask the workers to stop if the block raises."""
        try:
            yield
        except BaseException:
            self.make()
            raise


@pydantic_dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class FailurePolicy:
    """When the run tries again, and when it gives up. Rows with unusable input (invalid ones) are not tried and do not
    count as failed; nor do rows whose answer is cut."""

    retries: Annotated[
        int, Field(ge=0, description="retries of a failing partition before it is split to find the rows that fail")
    ] = 2
    retry_delay_seconds: Annotated[
        float, Field(ge=0, description="seconds before the first retry; each further delay is twice as long")
    ] = 1.0
    max_error_rate: Annotated[
        float, Field(ge=0, le=1, description="the run fails if a larger share of the tried rows fails")
    ] = 0.5
    max_invalid_rate: Annotated[
        float, Field(ge=0, le=1, description="the run fails, and loads no model, if a larger share is invalid")
    ] = 1.0
    error_rate_rows: Annotated[int, Field(ge=1, description="fewest rows for which these shares are checked")] = 20

    def check(self, reasons: Counter[str], num_rows: int) -> None:
        """Raise `FailureRateError` if too many of `num_rows` failed; `reasons` counts the failed rows by reason."""
        if num_rows >= self.error_rate_rows and reasons.total() > self.max_error_rate * num_rows:
            from tasks.runs.failure_rate import rate_error  # imported only when needed

            raise rate_error("failed", "max_error_rate", self.max_error_rate, reasons, num_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMember:
    """One of the workloads whose rows are in one plan.

    Attributes:
        run_folder: of the workload's run, for its parts and step records.
        first_row_id: row id of its first row in the plan; the next member's rows follow its own.
        expected_output_tokens: of an answer, see `AnswerLength`.
    """

    run_folder: Path
    workload: Workload
    first_row_id: int = 0
    expected_output_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InferJob:
    """What all partitions of a run have in common.

    Attributes:
        members: the workloads whose rows are in the plan, in the order of their rows.
        model_digest: of the checkpoint's content; an engine with another digest is loaded anew.
        exchange: URL of the run's folder in a store, see `ObjectStore`, where workers that do not see the paths above
            get their work and put their results; empty if all see them.
        model: as the user named it, a local path absolute; with an exchange, each host resolves it to its own copy.
        deadline: Unix time after which no step of the engine begins; None for none.
        keeps_base: the night also uses other adapters of the same model, see `Engine.load`.
    """

    members: tuple[JobMember, ...]
    plan: ArtifactRef
    checkpoint: str
    model_digest: str
    engine: EngineConfig
    failures: FailurePolicy
    exchange: str = ""
    model: str = ""
    deadline: float | None = None
    keeps_base: bool = False

    @property
    def first(self) -> JobMember:
        """The member whose run folder holds what is told and noted of the whole job."""
        return self.members[0]

    def find_members(self, row_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The index in `members` of each row's workload."""
        firsts = [member.first_row_id for member in self.members]
        return np.asarray(np.searchsorted(firsts, row_ids, side="right") - 1)

    @property
    def title(self) -> str:
        """The name of the run in the log and in front of its progress."""
        return " + ".join(dict.fromkeys(member.workload.name for member in self.members))

    @property
    def stop(self) -> StopRequest:
        """The run's request to stop."""
        return StopRequest(self.first.run_folder, self.deadline)
