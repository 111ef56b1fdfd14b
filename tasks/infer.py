"""One partition of the plan to one part of the answers, by the engine of this process."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
from prefect import task
from prefect.cache_policies import NO_CACHE

from engine.config import EngineConfig
from engine.errors import ArtifactError
from engine.prefix_groups import rebuild_groups
from engine.request import Completion, Request
from engine.step_record import StepRecord
from tasks.artifact import ArtifactRef, describe_parquet, write_parquet
from tasks.engine_host import PROCESS_HOST, LoadedModel
from tasks.partition import Partition, read_partition
from tasks.progress import PartitionProgress
from tasks.prompt import build_prompt_format, encode_labels
from tasks.stop_request import StopRequest
from tasks.text_codec import TextCodec
from tasks.workload import Workload, load_workload

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
    ]
)
"""One row a row of the partition, by row_id: an answer, or a score with label and label_logprobs, or an error."""

STEPS_SCHEMA = pa.schema(
    [pa.field("partition", pa.int32(), nullable=False)]
    + [
        pa.field(field.name, pa.float64() if field.name == "duration_ms" else pa.int64(), nullable=False)
        for field in fields(StepRecord)
    ]
)
"""One row a step of the engine, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferJob:
    """What all partitions of a run have in common.

    Attributes:
        run_folder: where parts and step records go.
        checkpoint: the model's folder.
        model_digest: of its content; another content is loaded anew.
    """

    run_folder: str
    tokens: ArtifactRef
    plan: ArtifactRef
    workload_source: str
    checkpoint: str
    model_digest: str
    engine: EngineConfig


class _StoppedError(Exception):
    """Ends the engine's loop from inside a step."""


@task(name="infer", retries=0, cache_policy=NO_CACHE, persist_result=False, task_run_name="infer-{partition}")
def infer(partition: int, job: InferJob) -> ArtifactRef | None:
    """Answer one partition: write ``steps/part-XXXXX.parquet``, then ``parts/part-XXXXX.parquet``; return the latter.

    A part that is there and whole is returned without work. None where the run was asked to stop before the end.

    Raises:
        ArtifactError: the plan or the tokens are not what their references say.
        ModelError, CapacityError: and whatever else the engine fails with; no part is written then.
    """
    folder, name = Path(job.run_folder), f"part-{partition:05d}.parquet"
    stop, progress = StopRequest(folder), PartitionProgress(folder, partition)
    part = _find_whole(folder / "parts" / name)
    if part is None and not stop.is_made:
        rows = read_partition(job.plan, job.tokens, partition)
        steps: list[StepRecord] = []

        def on_step(step: StepRecord) -> None:
            steps.append(step)
            progress.add(step)
            if stop.is_made:
                raise _StoppedError

        try:
            with PROCESS_HOST.use(job.checkpoint, job.model_digest, job.engine) as model:
                batch = answer_partition(rows, load_workload(job.workload_source), model, on_step)
        except _StoppedError:
            return None
        write_parquet(folder / "steps" / name, STEPS_SCHEMA, [_step_batch(partition, steps)])
        part = write_parquet(folder / "parts" / name, PART_SCHEMA, [batch])
    if part is not None:
        progress.finish(part.num_rows)
    return part


def answer_partition(
    rows: Partition, workload: Workload, model: LoadedModel, on_step: Callable[[StepRecord], None]
) -> pa.RecordBatch:
    """Answers in the form of `PART_SCHEMA`. What `on_step` or the engine raises comes through."""
    form = build_prompt_format(workload.prompt, model.codec)
    labels = encode_labels(workload.labels, form, model.codec)
    settings = {"labels": tuple(labels)} if workload.mode == "score" else asdict(workload.decoding)
    requests = [
        Request(request_id=str(row_id), token_ids=prompt, mode=workload.mode, **settings)
        for row_id, prompt in zip(rows.row_ids.tolist(), rows.prompts, strict=True)
    ]
    groups = rebuild_groups(rows.prompts, rows.group_id, rows.member_id, rows.num_prefix_tokens)
    completions = model.engine.run_plan(requests, groups, decode=model.codec.decode, on_step=on_step)
    answers = [_answer_row(completion, workload, model.codec) for completion in completions]
    answers.sort(key=lambda answer: answer["row_id"])
    return pa.RecordBatch.from_pylist(answers, schema=PART_SCHEMA)


def _answer_row(completion: Completion, workload: Workload, codec: TextCodec) -> dict[str, Any]:
    row = {
        "row_id": int(completion.request_id),
        "finish_reason": completion.finish_reason,
        "error": completion.error,
        "num_prompt_tokens": completion.num_prompt_tokens,
        "num_cached_tokens": completion.num_cached_tokens,
        "num_output_tokens": completion.num_output_tokens,
    }
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


def _step_batch(partition: int, steps: list[StepRecord]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"partition": partition, **asdict(step)} for step in steps], schema=STEPS_SCHEMA)


def _find_whole(path: Path) -> ArtifactRef | None:
    try:
        return describe_parquet(path)
    except ArtifactError:
        return None
