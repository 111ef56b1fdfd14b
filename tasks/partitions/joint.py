"""Partitions with rows of several workloads: each workload makes its own requests and keeps its own answers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.completion import Completion
from engine.execution.step_record import StepRecord
from engine.planning.plan import Plan
from engine.request import Request
from tasks.partitions.partition_work import PartitionWork
from tasks.prompts.prompt import RequestForm
from tasks.prompts.text_codec import TextCodec
from tasks.runs.infer_job import InferJob
from tasks.runs.progress import PartitionProgress
from tasks.workloads.workload import Workload


class _NoProgress(PartitionProgress):
    """Writes no counts: those of all members together are written once."""

    def _write(self) -> None:
        pass


def split_rows(rows: Plan, job: InferJob) -> list[Plan]:
    """The rows of each of `InferJob.members`, in that order, with the row ids of the member's own tokens."""
    owners = find_members(rows.row_id, job)
    parts = [rows.select(owners == number) for number in range(len(job.members))]
    pairs = zip(parts, job.members, strict=True)
    return [replace(part, row_id=part.row_id - member.first_row_id) for part, member in pairs]


def find_members(row_ids: npt.NDArray[np.int64], job: InferJob) -> npt.NDArray[np.int64]:
    """The index in `InferJob.members` of each row's workload."""
    firsts = np.array([member.first_row_id for member in job.members], np.int64)
    return np.asarray(np.searchsorted(firsts, row_ids, side="right") - 1)


def ask_jointly(rows: Plan, job: InferJob, make_form: Callable[[Workload, int | None], RequestForm]) -> list[Request]:
    """As `RequestForm.ask` for rows of a joint plan, with the form of each row's workload.

    Args:
        make_form: the form of a workload's requests, given its expected output tokens.
    """
    requests = []
    for part, member in zip(split_rows(rows, job), job.members, strict=True):
        form = make_form(member.workload, member.expected_output_tokens)
        requests += [
            replace(request, request_id=str(int(request.request_id) + member.first_row_id))
            for request in form.ask(part)
        ]
    return requests


class JointWork(PartitionWork):
    """As `PartitionWork` for a partition of a joint plan: answers go to the runs of several workloads, and each run
    gets all step records."""

    def __init__(self, job: InferJob, partition: int) -> None:
        self._job = job
        self._works = [
            PartitionWork(member.run_folder, partition, member.workload, upload_file=lambda path: None)
            for member in job.members
        ]
        for work, member in zip(self._works, job.members, strict=True):
            work.progress = _NoProgress(Path(member.run_folder), partition)
        self.progress = PartitionProgress(Path(job.run_folder), partition)
        self._add_up()

    def keep(
        self,
        completions: Sequence[Completion],
        rows: Plan,
        codec: TextCodec | None,
        steps: Sequence[StepRecord],
        ended_at: datetime,
    ) -> None:
        """See `PartitionWork.keep`; each completion goes to the run of its workload."""
        owners = find_members(np.array([int(one.request_id) for one in completions], np.int64), self._job).tolist()
        for number, (work, part) in enumerate(zip(self._works, split_rows(rows, self._job), strict=True)):
            first_row_id = self._job.members[number].first_row_id
            own = [
                replace(completion, request_id=str(int(completion.request_id) - first_row_id))
                for completion, owner in zip(completions, owners, strict=True)
                if owner == number
            ]
            work.keep(own, part, codec, steps, ended_at)
        self._add_up()

    def _add_up(self) -> None:
        members = zip(self._works, self._job.members, strict=True)
        self.answered = np.concatenate([work.answered + member.first_row_id for work, member in members])
        self.parts = [part for work in self._works for part in work.parts]
        self.num_failed = sum(work.num_failed for work in self._works)
        self.progress.settle(len(self.answered), self.num_failed)
