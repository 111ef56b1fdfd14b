"""Rows that the model fails on: what it failed with, whether it fails on others too, what becomes of them."""

from collections import Counter

import pyarrow as pa
import torch

from engine.errors import BatchloomError, DeviceError
from engine.execution.step_record import StepRecord
from engine.planning.plan import Plan
from tasks.answers.kind import AnswerKind
from tasks.partitions.attempt import Failure, StoppedError, run_model, use_model
from tasks.partitions.out_of_memory import is_out_of_memory
from tasks.partitions.part import part_schema
from tasks.runs.infer_job import InferJob
from tasks.storage.plan_samples import read_spread_rows


def judge_failure(error: Exception) -> Failure:
    """What the model failed with; raises `DeviceError` where the process cannot go on."""
    reason = f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"
    if isinstance(error, torch.AcceleratorError):
        raise DeviceError(f"the device fails: {reason}") from error
    return Failure(reason=reason, is_out_of_memory=is_out_of_memory(error))


def check_other_rows(job: InferJob) -> None:
    """Try rows from all over the plan, one by one, and forget their answers.

    Where one partition fails again and again, this tells what is wrong with its rows from what is wrong with all.

    Raises:
        FailureRateError: more of them fail than `FailurePolicy.max_error_rate` allows.
        StoppedError, BatchloomError, OSError: as `try_rows`.
    """
    sample = read_spread_rows(job.plan, job.failures.error_rate_rows)
    stop = job.stop
    reasons: Counter[str] = Counter()

    def on_step(step: StepRecord) -> None:
        if stop.is_made:
            raise StoppedError

    with use_model(job) as model:
        for row in sample:
            try:
                (completion,) = run_model(row, job, model, on_step)
                reasons.update([completion.error] if completion.error else [])
            except (StoppedError, BatchloomError, OSError):
                raise
            except Exception as error:
                reasons.update([judge_failure(error).reason])
    job.failures.check(reasons, len(sample))


def error_batch(rows: Plan, reason: str, kind: AnswerKind) -> pa.RecordBatch:
    """Rows that were tried in vain, in the form of `part_schema`.

    Args:
        rows: the rows that were tried.
        reason: what they failed with.
        kind: of answer that they do not have.
    """
    errors = [
        {
            "row_id": row_id,
            "finish_reason": "error",
            "error": reason,
            "num_prompt_tokens": len(prompt),
            "num_cached_tokens": 0,
            "num_output_tokens": 0,
            "compute_ms": 0.0,
            "prefix_group": group_id,
        }
        for row_id, prompt, group_id in zip(rows.row_id.tolist(), rows.prompts, rows.group_id.tolist(), strict=True)
    ]
    errors.sort(key=lambda error: error["row_id"])
    return pa.RecordBatch.from_pylist(errors, schema=part_schema(kind))
