"""Finds the rows of a partition that make the model fail, and turns them into error rows."""

import logging
import time
from collections import Counter
from collections.abc import Sequence
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
from tasks.partitions.partition_work import PartitionWork, Piece
from tasks.runs.infer_job import LOOK_SECONDS, InferJob, StopRequest
from tasks.storage.plan_file import read_spread_rows

LOGGER = logging.getLogger("batchloom")


class FailingRows:
    """Retries and splits the rows of a partition after a failed attempt. See `answer_partition`."""

    def __init__(self, work: PartitionWork, rows: Plan) -> None:
        self._job, self._work, self._attempts, self._rows = work.job, work, work.attempts, rows
        self._prompt_of_row = np.cumsum(rows.is_member_start) - 1
        self._whole = Piece(first=0, last=int(self._prompt_of_row[-1]))
        self._num_failures = 0

    def answer(self, failure: Failure | None) -> None:
        """Try the rows until each has an answer or an error in `work`, after a failed attempt at all of them, or None
        if its process died. Raises what `answer_partition` raises."""
        todo = [self._whole]
        while todo:
            piece = todo.pop()
            prompts = np.unique(self._prompt_of_row[self._is_left(piece)])
            if not len(prompts):
                continue
            if self._job.stop.is_made:
                raise StoppedError
            num_earlier = 0
            if failure is None:
                num_earlier = self._attempts.count(piece)
                # Between the whole and a single prompt, a piece that ended a process is split without a second attempt.
                is_half = piece != self._whole and len(prompts) > 1
                most_earlier = 0 if is_half else self._job.failures.retries
                if num_earlier <= most_earlier:
                    failure = try_rows(self._rows.select(self._is_left(piece)), self._work, piece)
                    if failure is None:
                        continue
            todo += self._find_next(piece, prompts, num_earlier, failure or ENDED)
            failure = None

    def _is_left(self, piece: Piece) -> npt.NDArray[np.bool_]:
        """Which rows are of the piece and have no answer."""
        is_inside = (self._prompt_of_row >= piece.first) & (self._prompt_of_row <= piece.last)
        return np.asarray(is_inside & ~np.isin(self._rows.row_id, self._work.answered))

    def _find_next(
        self, piece: Piece, prompts: npt.NDArray[np.int64], num_earlier: int, failure: Failure
    ) -> Sequence[Piece]:
        """The pieces to try after a failure of one, as a stack: the last one is tried first.

        Args:
            prompts: of the piece, those without an answer.
            num_earlier: attempts at the piece before this one.
        """
        if failure.is_out_of_memory and PROCESS_HOST.lower_memory():
            self._attempts.forget(piece)
            return [piece]
        policy, stop, reason = self._job.failures, self._job.stop, failure.reason
        self._num_failures += 1
        if self._num_failures == policy.error_rate_rows:
            check_other_rows(self._job)
        if piece == self._whole and num_earlier < policy.retries:
            delay_seconds = policy.retry_delay_seconds * 2**num_earlier
            LOGGER.warning("%s: trying again in %g s: %s", self._work.title, delay_seconds, reason)
            _wait(stop, delay_seconds)
            return [piece]
        if len(prompts) > 1:
            return _split(prompts, self._rows.group_id[self._rows.is_member_start])[::-1]
        rows = self._rows.select(self._is_left(piece))
        failed = [
            Completion.refuse(str(row_id), len(prompt), reason)
            for row_id, prompt in zip(rows.row_id.tolist(), rows.prompts, strict=True)
        ]
        self._work.keep(failed, rows, codec=None, steps=[], ended_at=datetime.now(UTC))
        return []


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
    if not failure.is_out_of_memory and (isinstance(error, torch.AcceleratorError) or has_failed()):
        raise DeviceError(f"the device fails: {failure.reason}") from error
    return failure


def check_other_rows(job: InferJob) -> None:
    """Try a sample of rows from all over the plan, one by one, and drop their answers, to tell whether only the rows of
    a failing partition are bad. Raises as `FailurePolicy.check` and `try_rows`."""
    sample = read_spread_rows(job.plan, job.failures.error_rate_rows)
    reasons: Counter[str] = Counter()

    def on_step(step: StepRecord) -> None:
        if job.stop.is_made:
            raise StoppedError

    with PROCESS_HOST.use(job) as model:
        for row in sample:
            try:
                (completion,) = run_model(row, job, model, on_step)
                reasons.update([completion.error] if completion.error else [])
            except (StoppedError, BatchloomError, OSError):
                raise
            except Exception as error:
                reasons.update([judge_failure(error).reason])
    job.failures.check(reasons, len(sample))
