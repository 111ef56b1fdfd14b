"""What a worker leaves behind: answers and step records, as rows of Parquet files."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from engine.execution.step_record import StepRecord
from engine.planning.plan import Plan
from engine.request import Completion
from tasks.prompts.text_codec import TextCodec
from tasks.storage.artifact import ArtifactRef
from tasks.workloads.workload import Workload

PART_SCHEMA = pa.schema(
    [
        pa.field("row_id", pa.int64(), nullable=False),
        pa.field("answer", pa.string()),
        pa.field("score", pa.float64()),
        pa.field("label", pa.string()),
        pa.field("label_logprobs", pa.list_(pa.float64())),
        pa.field("token_ids", pa.list_(pa.int32())),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("error", pa.string()),
        pa.field("num_prompt_tokens", pa.int32(), nullable=False),
        pa.field("num_cached_tokens", pa.int32(), nullable=False),
        pa.field("num_output_tokens", pa.int32(), nullable=False),
        pa.field("compute_ms", pa.float64(), nullable=False),
        pa.field("prefix_group", pa.int64(), nullable=False),
    ]
)
"""One row a row of the partition, by row_id: an answer, or a score with label and label_logprobs, or an error."""

FROM_COMPLETION = (
    *("finish_reason", "error", "compute_ms"),
    *("num_prompt_tokens", "num_cached_tokens", "num_output_tokens"),
)
"""Columns of a part that are fields of a `Completion`."""

STEPS_SCHEMA = pa.schema(
    [pa.field("partition", pa.int32(), nullable=False)]
    + [
        pa.field(field.name, pa.float64() if field.name == "duration_ms" else pa.int64(), nullable=False)
        for field in fields(StepRecord)
    ]
    + [
        pa.field("worker", pa.string(), nullable=False),
        pa.field("started_at", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)
"""One row a step of the engine, in order; `worker` names the engine that did it among those of the run."""


def answer_batch(completions: Iterable[Completion], rows: Plan, workload: Workload, codec: TextCodec) -> pa.RecordBatch:
    """Completions of `rows`, in any order, in the form of `PART_SCHEMA`.

    Args:
        rows: the rows that were tried; they give each row's group.
        workload: how an output becomes an answer.
        codec: decodes token ids.
    """
    group_of = dict(zip(rows.row_id.tolist(), rows.group_id.tolist(), strict=True))
    answers = [_answer_row(completion, group_of, workload, codec) for completion in completions]
    answers.sort(key=lambda answer: answer["row_id"])
    return pa.RecordBatch.from_pylist(answers, schema=PART_SCHEMA)


def error_batch(rows: Plan, reason: str) -> pa.RecordBatch:
    """Rows that were tried in vain, in the form of `PART_SCHEMA`."""
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
    return pa.RecordBatch.from_pylist(errors, schema=PART_SCHEMA)


def step_batch(
    partition: int, steps: Sequence[StepRecord], first_step: int, worker: str, ended_at: datetime
) -> pa.RecordBatch:
    """Step records in the form of `STEPS_SCHEMA`, numbered from `first_step`.

    Args:
        ended_at: when the last one ended. One begins where the one before ends, so their times say when each began.
    """
    all_ms = sum(step.duration_ms for step in steps)
    ends_ms = accumulate(step.duration_ms for step in steps)
    records = [
        {
            "partition": partition,
            **asdict(step),
            "step": number,
            "worker": worker,
            "started_at": ended_at.astimezone(UTC) - timedelta(milliseconds=all_ms - end_ms + step.duration_ms),
        }
        for number, (step, end_ms) in enumerate(zip(steps, ends_ms, strict=True), first_step)
    ]
    return pa.RecordBatch.from_pylist(records, schema=STEPS_SCHEMA)


def count_reasons(parts: Iterable[ArtifactRef]) -> Counter[str]:
    """How many rows of the parts failed, by reason."""
    reasons: Counter[str] = Counter()
    for part in parts:
        errors = pq.read_table(part.path, columns=["error"]).column("error").drop_null()
        reasons.update(errors.to_pylist())
    return reasons


def _answer_row(
    completion: Completion, group_of: dict[int, int], workload: Workload, codec: TextCodec
) -> dict[str, Any]:
    row_id = int(completion.request_id)
    row = {name: getattr(completion, name) for name in FROM_COMPLETION}
    row |= {"row_id": row_id, "prefix_group": group_of[row_id]}
    if completion.error is not None:
        return row
    if workload.mode == "score":
        logprobs = [float(logprob) for logprob in completion.label_logprobs]
        best = max(range(len(logprobs)), key=logprobs.__getitem__)
        return row | {"score": math.exp(logprobs[0]), "label": workload.labels[best], "label_logprobs": logprobs}
    token_ids = [int(token) for token in completion.token_ids]
    return row | {"answer": _cut(codec.decode(token_ids), workload.decoding.stop), "token_ids": token_ids}


def _cut(text: str, stop: tuple[str, ...]) -> str:
    """The answer up to the first stop string, without white space around it."""
    ends = [end for end in (text.find(string) for string in stop) if end >= 0]
    return text[: min(ends, default=len(text))].strip()
