"""Samples a workload's rows: chooses them in proportion, writes their requests, and reads their answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow.parquet as pq
from prefect import task
from prefect.cache_policies import NO_CACHE

from sql import statement
from tasks.database.connection import execute
from tasks.storage.artifact import ArtifactRef, open_parquet, write_parquet
from tasks.storage.batches import BATCH_ROWS
from tasks.workloads.workload import Workload

SEED = 0
"""Decides which rows are chosen."""

HIDDEN_COLUMNS = (
    *("row_id", "token_ids", "label_logprobs", "finish_reason", "error", "compute_ms", "prefix_group"),
    *("num_prompt_tokens", "num_cached_tokens", "num_output_tokens"),
)
"""Columns of a part that are not shown as the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Chosen rows: their requests, numbered from 0, how many rows of the whole workload share the prefix of each (1 if
    it shares none), and the number of rows to choose from, without those that have an error."""

    requests: ArtifactRef
    share_degrees: Sequence[int]
    num_all: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRow:
    """A row of the sample: its key, the columns of its answer to their values, without nulls, and why there is no
    answer."""

    key: Mapping[str, Any]
    share_degree: int
    num_prompt_tokens: int
    num_output_tokens: int
    answer: Mapping[str, Any]
    error: str | None


@task(name="sample", retries=0, cache_policy=NO_CACHE, persist_result=False)
def choose_rows(
    requests: ArtifactRef,
    tokens: ArtifactRef,
    plan: ArtifactRef,
    folder: str,
    num_rows: int,
    workload: Workload,
) -> Sample:
    """Write ``requests.parquet`` with `num_rows` rows (all if there are fewer) to the folder of the run that answers
    the sample. Raises `ArtifactError` if an artifact is not what its reference says, or the folder cannot be written.

    Args:
        requests, tokens, plan: of all rows of the workload.
    """
    for ref in (requests, tokens, plan):
        open_parquet(ref).close()
    files = {"plan": plan.path, "tokens": tokens.path}
    num_questions = len(workload.kind.suffixes)
    with duckdb.connect() as connection:
        how = {**files, "num_rows": num_rows, "seed": SEED, "num_questions": num_questions}
        chosen = execute(connection, "sample/choose_rows", how).fetchall()
        parameters = {"requests": requests.path, "row_ids": [row_id for row_id, _, _ in chosen]}
        num_all = len(np.unique(pq.read_table(plan.path, columns=["row_id"]).column(0).to_numpy() // num_questions))
        rows = connection.sql(statement("sample/take_requests"), params=parameters).to_arrow_reader(BATCH_ROWS)
        with open_parquet(requests) as file:
            schema = file.schema_arrow
        sampled = write_parquet(
            Path(folder) / "requests.parquet", schema, (batch.select(schema.names).cast(schema) for batch in rows)
        )
    return Sample(requests=sampled, share_degrees=[degree for _, degree, _ in chosen], num_all=num_all)


def read_sample(sample: Sample, workload: Workload, parts: Sequence[ArtifactRef]) -> list[SampledRow]:
    """The chosen rows with their answers, in the order of the requests.

    Args:
        workload, parts: with the key columns, and with all answers.
    """
    keys = pq.read_table(sample.requests.path, columns=list(workload.key)).to_pylist()
    answers: dict[int, dict[str, Any]] = {}
    for part in parts:
        for row in pq.read_table(part.path).to_pylist():
            number = row["row_id"] // len(workload.kind.suffixes)
            answers[number] = _join(answers[number], row) if number in answers else row
    return [
        SampledRow(
            key=key,
            share_degree=degree,
            num_prompt_tokens=answers[number]["num_prompt_tokens"],
            num_output_tokens=answers[number]["num_output_tokens"],
            answer={
                name: value
                for name, value in answers[number].items()
                if name not in HIDDEN_COLUMNS and value is not None
            },
            error=answers[number]["error"],
        )
        for number, (key, degree) in enumerate(zip(keys, sample.share_degrees, strict=True))
        if number in answers
    ]


def _join(row: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Joins the answers to two questions about a row."""
    sums = {name: row[name] + other[name] for name in ("num_prompt_tokens", "num_output_tokens")}
    error = "; ".join(filter(None, (row["error"], other["error"]))) or None
    return row | {name: value for name, value in other.items() if value is not None} | sums | {"error": error}
