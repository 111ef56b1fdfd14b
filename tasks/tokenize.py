"""Turns requests.parquet into tokens.parquet: the token ids of each row's prompt, batch by batch."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from prefect import task
from prefect.cache_policies import NO_CACHE

from engine.errors import WorkloadError
from engine.model.loading.checkpoint import is_plain, read_json
from engine.model.loading.config_sizes import find_size
from engine.model.longest_sequence import find_longest
from tasks.prompts.prompt import SUFFIX, Encode, PromptEncoder, RequestForm, workload_format
from tasks.prompts.row_orders import ROW_LAYOUT, encode_by_layout
from tasks.prompts.text_codec import TextCodec
from tasks.prompts.text_limit import cut_prompts, limit_prompts
from tasks.runs.source import Source
from tasks.storage.artifact import ArtifactRef, build_once, open_parquet, write_parquet
from tasks.storage.plan_file import list_tokens
from tasks.storage.schemas import TOKENS_SCHEMA
from tasks.workloads.workload import Workload

NO_TOKENS = np.empty(0, np.int32)

BATCH_PROMPTS = 512
"""Rows encoded at a time: enough to keep every core busy, few enough for long documents in memory."""


@task(name="tokenize", retries=0, cache_policy=NO_CACHE, persist_result=False, task_run_name="tokenize-{workload.name}")
def tokenize(source: Source, requests: ArtifactRef, workload: Workload) -> ArtifactRef:
    """The prompts from the cache of the source's database, written if it does not have them. See `write_tokens`."""
    limit = source.max_model_len
    content = (requests.digest, workload.digest, source.model_digest, limit)
    write = partial(write_tokens, requests, workload=workload, checkpoint=source.checkpoint, max_model_len=limit)
    return build_once(source.database, "tokens", content, write)


def write_tokens(
    requests: ArtifactRef, target: str | Path, workload: Workload, checkpoint: str | Path, max_model_len: int
) -> ArtifactRef:
    """Write `target`: the prompts of `requests` as token ids of a model. Raises `ModelError` or `WorkloadError` if the
    tokenizer cannot be used for this workload, `ArtifactError` as `open_parquet` and `write_parquet`.

    Args:
        max_model_len: tokens of the longest prompt plus answer.
    """
    check_room(workload, max_model_len)
    codec, prompt = TextCodec.load(Path(checkpoint)), workload.prompt
    num_answer_tokens, columns = RequestForm.of(workload, codec, None).num_answer_tokens, list(prompt.fields)
    encode: Encode = PromptEncoder(workload_format(prompt, workload.kind.thinking, codec), codec).encode
    if workload.row_layouts is not None:
        columns, encode = [*columns, ROW_LAYOUT], encode_by_layout(workload, codec)
    if workload.kind.is_pooled:
        num_answer_tokens = 0
        max_model_len, encode = limit_prompts(encode, workload.kind, prompt, codec, Path(checkpoint), max_model_len)
    suffixes = [codec.trust(suffix) for suffix in workload.kind.suffixes]
    if prompt.cut:
        encode = cut_prompts(encode, prompt.cut, suffixes, max_model_len - num_answer_tokens)
    with open_parquet(requests) as file:
        batches = tokenize_requests(file, columns, encode, max_model_len, num_answer_tokens, suffixes)
        return write_parquet(target, TOKENS_SCHEMA, batches)


def check_room(workload: Workload, max_model_len: int) -> None:
    """Raise `WorkloadError` where the longest answer takes all of `max_model_len` and leaves no room for a prompt."""
    if (most := workload.kind.max_answer_tokens) >= max_model_len:
        room = f"answers of up to {most:,} tokens leave no room for a prompt in the model's {max_model_len:,}"
        raise WorkloadError(f"workload {workload.name!r}: {room}")


def read_max_model_len(checkpoint: Path, setting: int | Literal["auto"]) -> int:
    """Longest prompt plus answer in tokens: the checkpoint's limit, or a lower setting; `ModelError` if it has none."""
    config = read_json(checkpoint / "config.json")
    limit = find_size(config, "max_position_embeddings") if is_plain(config) else find_longest(config)
    return limit if setting == "auto" else min(limit, setting)


def tokenize_requests(
    requests: pq.ParquetFile,
    columns: Sequence[str],
    encode: Encode,
    max_model_len: int,
    num_answer_tokens: int,
    suffixes: Sequence[str] = ("",),
) -> Iterator[pa.RecordBatch]:
    """Batches of `TOKENS_SCHEMA`, in the requests' order.

    Where a row makes several requests, the column ``open_questions`` holds the numbers of those to make, and the row id
    of request ``n`` of row ``r`` is ``r * len(suffixes) + n``.

    Args:
        requests: with the columns row_id, error, row_priority and `columns`.
        columns: what `encode` needs of each row.
        encode: gives the token ids of each row's prompt.
        max_model_len: tokens of the longest prompt plus answer.
        num_answer_tokens: of these, kept free for the answer.
        suffixes: see `AnswerKind.suffixes`; trusted.
    """
    numbers = ["open_questions"] if len(suffixes) > 1 else []
    names = ["row_id", "error", "row_priority", *numbers, *columns]
    for batch in requests.iter_batches(batch_size=BATCH_PROMPTS, columns=names):
        of_rows: list[str | None] = batch.column("error").to_pylist()
        texts = {column: batch.column(column).fill_null("").to_pylist() for column in columns}
        asked = np.array(list(_list_asked(batch, of_rows, numbers)), np.int64).reshape(-1, 2)
        errors = [of_rows[row] for row in asked[:, 0].tolist()]
        values = [
            {column: texts[column][row] for column in columns} | {SUFFIX: suffixes[number]}
            for (row, number), error in zip(asked.tolist(), errors, strict=True)
            if error is None
        ]
        encoded = iter(encode(values))
        prompts = [next(encoded) if error is None else NO_TOKENS for error in errors]
        for place, prompt in enumerate(prompts):
            errors[place] = errors[place] or _why_impossible(len(prompt), max_model_len, num_answer_tokens)
        kept = [NO_TOKENS if error else prompt for prompt, error in zip(prompts, errors, strict=True)]
        row_ids = batch.column("row_id").to_numpy()[asked[:, 0]] * len(suffixes) + asked[:, 1]
        priorities = batch.column("row_priority").to_numpy()[asked[:, 0]]
        yield pa.RecordBatch.from_arrays(
            [pa.array(row_ids), list_tokens(kept), pa.array(errors, pa.string()), pa.array(priorities)],
            schema=TOKENS_SCHEMA,
        )


def _list_asked(batch: pa.RecordBatch, errors: Sequence[str | None], names: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Row and number of each request to make; a row with an error has one, number 0."""
    opened = batch.column(names[0]).to_pylist() if names else repeat((0,))
    for row, (error, row_numbers) in enumerate(zip(errors, opened, strict=False)):
        for number in row_numbers if error is None else (0,):
            yield row, number


def _why_impossible(num_tokens: int, max_model_len: int, num_answer_tokens: int) -> str | None:
    if num_tokens > (limit := max_model_len - num_answer_tokens):
        limits = f"the limit is {limit}: {max_model_len} of the model less {num_answer_tokens} for the answer"
        return f"the prompt has {num_tokens} tokens, {limits}"
    return None if num_tokens else "the prompt has no tokens"
