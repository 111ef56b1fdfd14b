"""The rows of a worker's Parquet files: answers (parts) and step records."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime, timedelta
from itertools import accumulate

import pyarrow as pa
import pyarrow.parquet as pq

from engine.completion import Completion
from engine.execution.step_record import StepRecord
from engine.planning.plan import Plan
from tasks.answers.kind import AnswerKind
from tasks.prompts.text_codec import TextCodec
from tasks.storage.artifact import ArtifactRef
from tasks.workloads.workload import Workload

COMPLETION_FIELDS = (
    pa.field("finish_reason", pa.string(), nullable=False),
    pa.field("error", pa.string()),
    pa.field("num_prompt_tokens", pa.int32(), nullable=False),
    pa.field("num_cached_tokens", pa.int32(), nullable=False),
    pa.field("num_output_tokens", pa.int32(), nullable=False),
    pa.field("compute_ms", pa.float64(), nullable=False),
)
"""The columns of a part that are fields of `Completion`."""


def part_schema(kind: AnswerKind) -> pa.Schema:
    """One row for each answered row, sorted by row_id: the values of the kind's `part_fields`, or an error."""
    row_id, group = (pa.field(name, pa.int64(), nullable=False) for name in ("row_id", "prefix_group"))
    return pa.schema([row_id, *kind.part_fields, *COMPLETION_FIELDS, group])


STEPS_SCHEMA = pa.schema(
    [
        pa.field("partition", pa.int32(), nullable=False),
        *(
            pa.field(field.name, pa.float64() if field.name == "duration_ms" else pa.int64(), nullable=False)
            for field in fields(StepRecord)
        ),
        pa.field("worker", pa.string(), nullable=False),
        pa.field("started_at", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)
"""One row for each step of an engine, in order; `worker` names the engine among those of the run."""


def answer_batch(
    completions: Iterable[Completion], rows: Plan, workload: Workload, codec: TextCodec | None, first_row_id: int = 0
) -> pa.RecordBatch:
    """The completions of some of `rows`, in any order, as a batch of `part_schema`.

    Args:
        codec: decodes token ids; may be None if all completions are errors.
        first_row_id: in `rows` and completions, of the workload's row 0.
    """
    group_of = dict(zip(rows.row_id.tolist(), rows.group_id.tolist(), strict=True))
    answers = []
    for completion in sorted(completions, key=lambda completion: int(completion.request_id)):
        row_id = int(completion.request_id)
        answer = {field.name: getattr(completion, field.name) for field in COMPLETION_FIELDS}
        answer |= {"row_id": row_id - first_row_id, "prefix_group": group_of[row_id]}
        if completion.error is None:
            assert codec is not None, "answers need a tokenizer"
            own = replace(completion, request_id=str(row_id - first_row_id)) if first_row_id else completion
            answer |= workload.kind.read(own, codec.decode)
        answers.append(answer)
    return pa.RecordBatch.from_pylist(answers, schema=part_schema(workload.kind))


def step_batch(
    partition: int, steps: Sequence[StepRecord], first_step: int, worker: str, ended_at: datetime
) -> pa.RecordBatch:
    """The step records as a batch of `STEPS_SCHEMA`, numbered from `first_step`.

    Args:
        ended_at: when the last step ended; each step begins when the one before ends.
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
    """The number of rows in the parts that failed in the engine, by reason. Cut answers have not failed there."""
    failed = [("finish_reason", "==", "error")]
    tables = (pq.read_table(part.path, columns=["error"], filters=failed) for part in parts)
    return Counter(reason for table in tables for reason in table.column("error").to_pylist())
