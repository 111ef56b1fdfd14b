"""Answers one partition: all rows at once, and the rows that are left after a failure piece by piece."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

from engine.completion import Completion
from engine.device.placement import give_back_freed_memory
from engine.errors import BatchloomError, DeviceError
from engine.execution.step_record import StepRecord
from engine.planning.plan import Plan
from engine.request import Request
from tasks.partitions.engine_host import PROCESS_HOST, LoadedModel
from tasks.partitions.partition_work import PartitionWork, Piece
from tasks.prompts.prompt import RequestForm
from tasks.runs.engine_notes import note_engine
from tasks.runs.infer_job import InferJob
from tasks.storage.artifact import ArtifactRef
from tasks.storage.plan_file import read_partition
from tasks.workloads.workload import Workload

LOGGER = logging.getLogger("batchloom")

KEEP_SECONDS = 30.0
"""How often answers are written while rows run. Freed memory is returned to the system then, too: steps differ in size,
which fragments the C library's heap. Both take some milliseconds."""


class StoppedError(Exception):
    """The run was asked to stop; raised from inside a step of the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an attempt failed."""

    reason: str
    is_out_of_memory: bool = False


ENDED = Failure(reason="the process that tried it ended each time")


def infer_partition(
    partition: int, job: InferJob, upload_file: Callable[[Path], None] = lambda path: None
) -> list[ArtifactRef] | None:
    """Answer one partition; returns references of its parts, or None if the run was asked to stop, but not by its
    deadline. Rows in a part are not answered again. See `PartitionWork` and, for errors, `answer_partition`."""
    work = PartitionWork(partition, job, upload_file)
    try:
        answer_partition(work)
    except StoppedError:
        if not job.stop.is_overdue:
            return None
    return work.parts


def answer_partition(work: PartitionWork) -> None:
    """Try the partition's rows until each has an answer or an error in `work`.

    If the model fails, the answers so far are kept. The other rows are retried after a delay, then split in two until
    the failing rows are found, which become error rows. If memory runs out, the model is loaded again with less memory.

    Raises:
        StoppedError: the run was asked to stop.
        ArtifactError: the plan is not what its reference says, or the run folder cannot be written.
        ModelError, CapacityError: the model cannot be loaded.
        DeviceError: the device has failed for good.
        FailureRateError: rows fail all over the plan, so their content is not the cause.
    """
    rows = read_partition(work.job.plan, work.partition)
    left = rows.select(~np.isin(rows.row_id, work.answered))
    if left.num_rows:
        if work.job.stop.is_made:
            raise StoppedError
        whole = Piece(first=0, last=int(rows.is_member_start.sum()) - 1)
        has_ended, failure = work.attempts.count(whole) > 0, None
        if not has_ended and work.job.deadline is not None:
            from tasks.partitions.in_time import try_in_time  # imported only when needed

            failure = try_in_time(left, work, whole, work.job.deadline)
        elif not has_ended:
            failure = try_rows(left, work, whole)
        if has_ended or failure is not None:
            from tasks.partitions.failing import answer_failing  # imported only when needed

            answer_failing(work, rows, failure)
    if work.num_failed:
        LOGGER.warning("%s: %s rows failed", work.title, f"{work.num_failed:,}")


def try_rows(rows: Plan, work: PartitionWork, piece: Piece) -> Failure | None:
    """Try rows once; returns why the attempt failed, None if every row has an answer. However it ends, its answers and
    steps are in `work`. Raises `StoppedError` if the run was asked to stop, `BatchloomError` or `OSError` for a failure
    that no row causes.

    Args:
        piece: that the rows are of; the attempt at it counts once the model is loaded.
    """
    job, stop = work.job, work.job.stop
    steps: list[StepRecord] = []
    completions: list[Completion] = []
    kept_at, ended_at = time.monotonic(), datetime.now(UTC)

    def keep() -> None:
        work.keep(completions, rows, model.codec, steps, ended_at)
        completions.clear()
        steps.clear()

    def on_step(step: StepRecord) -> None:
        nonlocal kept_at, ended_at
        # The clock is read once per run: otherwise, after a delay here, a step could begin later than the next one.
        ended_at = datetime.now(UTC) if step.step == 0 else ended_at + timedelta(milliseconds=step.duration_ms)
        steps.append(step)
        work.progress.add(step)
        if not stop.has_time(step.duration_ms / 1e3 if step.step else 0.0):  # the first step includes the warm-up
            raise StoppedError
        if time.monotonic() - kept_at > KEEP_SECONDS:
            keep()
            give_back_freed_memory()
            kept_at = time.monotonic()

    with PROCESS_HOST.use(job) as model:
        if model.engine.config != job.engine:
            note_engine(job, model.engine.config)
        if stop.is_made:  # the deadline may have passed during loading
            raise StoppedError
        work.attempts.note(piece)
        try:
            for completion in run_model(rows, job, model, on_step):
                completions.append(completion)
        except (StoppedError, BatchloomError, OSError):
            raise
        except Exception as error:
            from tasks.partitions.failing import judge_failure  # imported only when needed

            try:
                return judge_failure(error)
            except DeviceError:  # not for its rows: the attempt does not count against them
                work.attempts.forget(piece)
                raise
        finally:
            keep()
    return None


def run_model(
    rows: Plan, job: InferJob, model: LoadedModel, on_step: Callable[[StepRecord], None]
) -> Iterator[Completion]:
    """Yields the model's answers as they are finished. See `Engine.run_plan`."""

    def make_form(workload: Workload, expected_output_tokens: int | None) -> RequestForm:
        form = RequestForm.of(workload, model.codec, expected_output_tokens)
        if any("grammar" in each or "thinking" in each for each in form.settings):
            from tasks.partitions.constraints import compile_constraints  # imported only when needed

            form = compile_constraints(form, model)
        return form

    requests = ask(rows, job, make_form)
    yield from model.engine.run_plan(requests, rows.groups(), decode=model.codec.decode, on_step=on_step)


def ask(rows: Plan, job: InferJob, make_form: Callable[[Workload, int | None], RequestForm]) -> list[Request]:
    """One request for each row of a job's plan, sorted by row id.

    Args:
        make_form: the form of a workload's requests, given its expected output tokens.
    """
    owners, requests = job.find_members(rows.row_id), list[Request]()
    for number, member in enumerate(job.members):
        form = make_form(member.workload, member.expected_output_tokens)
        requests += form.ask(rows.take(np.flatnonzero(owners == number)), member.first_row_id)
    return requests
