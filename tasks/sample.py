"""Samples a workload's rows: chooses them in proportion, writes their requests, and reads their answers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from prefect import task
from prefect.cache_policies import NO_CACHE

from sql import statement
from tasks.answers.kind import AnswerKind
from tasks.database.connection import execute, fill_identifiers
from tasks.database.opening import open_in_memory
from tasks.storage.artifact import ArtifactRef, open_parquet, write_parquet
from tasks.storage.batches import BATCH_ROWS
from tasks.workloads.workload import Workload

SEED = 0
"""Decides which rows are chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Chosen rows: their requests, numbered from 0, how many rows of the whole workload share the prefix of each (1 if
    it shares none), and the number of rows to choose from, without those that have an error."""

    requests: ArtifactRef
    share_degrees: Sequence[int]
    num_all: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredRow:
    """A row of a sample, whose answers are in no table: its key, the columns of the output table to their values (empty
    without an answer), why an answer is missing (None if none is), and the tokens of its prompts and answers."""

    key: Mapping[str, Any]
    answer: Mapping[str, Any]
    error: str | None
    num_prompt_tokens: int
    num_output_tokens: int


@task(name="sample", retries=0, cache_policy=NO_CACHE, persist_result=False)
def choose_rows(
    requests: ArtifactRef, tokens: ArtifactRef, plan: ArtifactRef, folder: Path, num_rows: int, workload: Workload
) -> Sample:
    """Write ``requests.parquet`` with `num_rows` rows (all if there are fewer) to the folder of the run that answers
    the sample. Raises `ArtifactError` if an artifact is not what its reference says, or the folder cannot be written.

    Args:
        requests: of the rows to choose from.
        tokens, plan: of all rows of the workload.
    """
    for ref in (requests, tokens, plan):
        open_parquet(ref).close()
    num_questions = len(workload.kind.suffixes)
    how = {"num_rows": num_rows, "seed": SEED, "num_questions": num_questions}
    with open_in_memory(requests.path) as connection:
        files = {"requests": requests.path, "plan": plan.path, "tokens": tokens.path}
        chosen = execute(connection, "sample/choose_rows", files | how).fetchall()
    num_all = len(np.unique(pq.read_table(plan.path, columns=["row_id"]).column(0).to_numpy() // num_questions))
    row_ids = {"row_ids": [row_id for row_id, _, _ in chosen]}
    sampled = take_requests.fn("sample/take_requests", requests, row_ids, folder / "requests.parquet")
    return Sample(requests=sampled, share_degrees=[degree for _, degree, _ in chosen], num_all=num_all)


@task(name="take_requests", retries=0, cache_policy=NO_CACHE, persist_result=False)
def take_requests(
    name: str, requests: ArtifactRef, parameters: Mapping[str, Any], target: Path, **identifiers: Sequence[str]
) -> ArtifactRef:
    """Write `target`: the rows that ``sql/<name>.sql`` takes from a requests artifact, in its columns.

    Args:
        parameters, identifiers: of the statement, beside $requests, the artifact's path.
    Raises:
        ArtifactError: the requests are not what their reference says, or `target` cannot be written.
    """
    text = fill_identifiers(statement(name), **identifiers)
    with open_parquet(requests) as file, open_in_memory(requests.path) as connection:
        schema = file.schema_arrow
        rows = connection.sql(text, params={"requests": requests.path, **parameters}).to_arrow_reader(BATCH_ROWS)
        return write_parquet(target, schema, (batch.select(schema.names).cast(schema) for batch in rows))


def read_answers(
    workload: Workload, requests: ArtifactRef, tokens: ArtifactRef, parts: Sequence[ArtifactRef]
) -> list[AnsweredRow]:
    """The rows with their answers, in the order of the requests.

    Args:
        requests, tokens, parts: of the rows, numbered from 0: keys, errors of prompts, and all answers.
    """
    prompts = pq.read_table(tokens.path, columns=["row_id", "error"]).to_pylist()
    counts = {"num_prompt_tokens": 0, "num_output_tokens": 0}
    asked = {prompt["row_id"]: {"error": prompt["error"] or "not answered", **counts} for prompt in prompts}
    asked |= {answer["row_id"]: answer for part in parts for answer in pq.read_table(part.path).to_pylist()}
    keys = pq.read_table(requests.path, columns=list(workload.key)).to_pylist()
    of_rows: list[list[Mapping[str, Any]]] = [[] for _ in keys]
    for row_id in sorted(asked):
        of_rows[row_id // len(workload.kind.suffixes)].append(asked[row_id])
    return [
        AnsweredRow(
            key=key,
            answer=_read_columns(workload.kind, found),
            error="; ".join(dict.fromkeys(each["error"] for each in found if each["error"])) or None,
            **{name: sum(each[name] for each in found) for name in counts},
        )
        for key, found in zip(keys, of_rows, strict=True)
    ]


def list_answer_lengths(rows: Sequence[AnsweredRow]) -> list[int]:
    """The output tokens of each decoded answer, in the order of `rows`: also of answers cut at their limit, whose rows
    may be error rows. A row that the model did not answer has none."""
    return [row.num_output_tokens for row in rows if row.error is None or row.num_output_tokens]


def _read_columns(kind: AnswerKind, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The values of the output table's columns from the answers to one row's requests, as parts hold them."""
    values = {
        name: value for each in found if each["error"] is None for name, value in each.items() if value is not None
    }
    if not values:
        return {}
    if kind.is_typed:
        values = json.loads(values["answer"])
        return {name: values.get(name) for name in kind.written}
    given = {field.name for field in kind.part_fields}
    return {name: values.get(place) for name, place in kind.written.items() if place in given}
