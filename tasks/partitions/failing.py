"""Finds the rows of a partition that make the model fail, and turns them into error rows."""

import json
import logging
import time
from collections import Counter
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt
import torch

from engine.completion import Completion
from engine.device.gpu import has_failed
from engine.errors import BatchloomError, DeviceError
from engine.execution.step_record import StepRecord
from engine.planning.plan import Plan
from tasks.partitions.attempt import ENDED, Failure, StoppedError, run_model, try_rows
from tasks.partitions.engine_host import PROCESS_HOST
from tasks.partitions.out_of_memory import is_out_of_memory
from tasks.partitions.partition_work import AttemptLog, PartitionWork, Piece
from tasks.runs.infer_job import LOOK_SECONDS, StopRequest
from tasks.storage.artifact import ArtifactRef
from tasks.storage.plan_file import read_partition, read_plan_summary

LOGGER = logging.getLogger("batchloom")


def answer_failing(work: PartitionWork, rows: Plan, failure: Failure | None) -> None:
    """Retry and split the rows of a partition until each has an answer or an error in `work`. See `answer_partition`.

    Args:
        failure: of an attempt at all rows; None if its process died.
    """
    job, policy, has_sampled = work.job, work.job.failures, False
    prompt_of_row = np.cumsum(rows.is_member_start) - 1
    whole = Piece(first=0, last=int(prompt_of_row[-1]))

    def is_left(piece: Piece) -> npt.NDArray[np.bool_]:
        """Which rows are of the piece and have no answer."""
        is_inside = (prompt_of_row >= piece.first) & (prompt_of_row <= piece.last)
        return np.asarray(is_inside & ~np.isin(rows.row_id, work.answered))

    todo = [whole]  # the last one is tried first
    while todo:
        piece = todo.pop()
        prompts = np.unique(prompt_of_row[is_left(piece)])
        if not len(prompts):
            continue
        if job.stop.is_made:
            raise StoppedError
        if not has_sampled and count_failures(work.attempts) >= policy.error_rate_rows:
            check_other_rows(work)
            has_sampled = True
        num_earlier = 0
        if failure is None:
            num_earlier = work.attempts.count(piece)
            # Between the whole and a single prompt, a piece that ended a process is split without a second attempt.
            is_half = piece != whole and len(prompts) > 1
            most_earlier = 0 if is_half else policy.retries
            if num_earlier <= most_earlier:
                failure = try_rows(rows.select(is_left(piece)), work, piece)
                if failure is None:
                    work.attempts.forget(piece)
                    continue
        last, failure = failure or ENDED, None
        if last.is_out_of_memory and PROCESS_HOST.lower_memory():
            work.attempts.forget(piece)
            todo.append(piece)
            continue
        if piece == whole and num_earlier < policy.retries:
            delay_seconds = policy.retry_delay_seconds * 2**num_earlier
            LOGGER.warning("%s: trying again in %g s: %s", work.title, delay_seconds, last.reason)
            _wait(job.stop, delay_seconds)
            todo.append(piece)
        elif len(prompts) > 1:
            todo += _split(prompts, rows.group_id[rows.is_member_start])[::-1]
        else:
            failed = rows.select(is_left(piece))
            errors = [
                Completion.refuse(str(row_id), len(prompt), last.reason)
                for row_id, prompt in zip(failed.row_id.tolist(), failed.prompts, strict=True)
            ]
            work.keep(errors, failed, codec=None, steps=[], ended_at=datetime.now(UTC))


def _wait(stop: StopRequest, seconds: float) -> None:
    """Sleeps; raises `StoppedError` once there is a request to stop."""
    end = time.monotonic() + seconds
    while not stop.is_made and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, LOOK_SECONDS))
    if stop.is_made:
        raise StoppedError


def _split(prompts: npt.NDArray[np.int64], group_of_prompt: npt.NDArray[np.int64]) -> tuple[Piece, Piece]:
    """Split a range of at least two prompts near its middle: between prefix groups if there are several."""
    cuts = np.flatnonzero(np.diff(group_of_prompt[prompts])) + 1
    middle = len(prompts) // 2
    cut = int(cuts[np.argmin(np.abs(cuts - middle))]) if len(cuts) else middle
    left, right = prompts[:cut].tolist(), prompts[cut:].tolist()
    return Piece(first=left[0], last=left[-1]), Piece(first=right[0], last=right[-1])


def judge_failure(error: Exception) -> Failure:
    """The failure that an error of the model stands for; raises `DeviceError` if the device is unusable from now on."""
    failure = Failure(
        reason=f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}",
        is_out_of_memory=is_out_of_memory(error),
    )
    is_initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    never_worked = isinstance(error, torch.AcceleratorError) and not is_initialized
    if not failure.is_out_of_memory and (never_worked or has_failed()):
        raise DeviceError(f"the device fails: {failure.reason}") from error
    return failure


def count_failures(attempts: AttemptLog) -> int:
    """How many attempts at the partition's pieces failed or ended their process, in this process and earlier ones."""
    files = attempts.run_folder.glob(f"attempts/part-{attempts.partition:05d}-*")
    return sum(path.stat().st_size for path in files)


def check_other_rows(work: PartitionWork) -> None:
    """Try a sample of rows from all over the plan, one by one, and drop their answers, to tell whether only the rows of
    a failing partition are bad. A row that ends its process counts as failed, and the next process goes on with the
    sample: its errors ("" for none) are in a file. Raises as `FailurePolicy.check` and `try_rows`."""
    job, attempts = work.job, work.attempts
    sample = read_spread_rows(job.plan, job.failures.error_rate_rows)
    path = attempts.run_folder / "attempts" / f"others-{attempts.partition:05d}"
    errors: list[str] = json.loads(path.read_bytes() or "[]") if path.exists() else []

    def note(found: list[str]) -> None:
        attempts.write(path, "wb", json.dumps(found).encode())
        attempts.write(attempts.starts, "wb")

    def on_step(step: StepRecord) -> None:
        if job.stop.is_made:
            raise StoppedError

    with PROCESS_HOST.use(job) as model:
        for row in sample[len(errors) :]:
            note([*errors, ENDED.reason])
            try:
                (completion,) = run_model(row, job, model, on_step)
                errors.append(completion.error or "")
            except (StoppedError, BatchloomError, OSError):
                raise
            except Exception as error:
                note(errors)  # the row counts as failed where its process ends, not where its device fails
                errors.append(judge_failure(error).reason)
    note(errors)
    job.failures.check(Counter(filter(None, errors)), len(sample))


def read_spread_rows(plan: ArtifactRef, num_rows: int) -> list[Plan]:
    """`num_rows` rows of a plan (all if it has fewer), evenly spread over its partitions, each as a plan of one row."""
    num_rows_of = read_plan_summary(plan).partition_rows
    partitions = np.repeat(np.arange(len(num_rows_of)), num_rows_of)
    chosen = np.unique(np.linspace(0, len(partitions) - 1, num_rows, dtype=np.int64))
    rows = []
    for partition in np.unique(partitions[chosen]).tolist():
        inside = chosen[partitions[chosen] == partition] - np.searchsorted(partitions, partition)
        whole = read_partition(plan, partition)
        rows += [whole.take(np.array([position])) for position in inside.tolist()]
    return rows
