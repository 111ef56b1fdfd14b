"""The prompts of two workloads for the same rows as one batch, and their answers apart again."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
from prefect import task
from prefect.cache_policies import NO_CACHE

from engine.errors import WorkloadError
from sql import statement
from tasks.answers.pair import PairedAnswers
from tasks.database.connection import fill_identifiers
from tasks.prompts.prompt import RequestForm
from tasks.prompts.text_codec import TextCodec
from tasks.read import BATCH_ROWS
from tasks.storage.artifact import ArtifactRef, open_parquet, write_parquet
from tasks.tokenize import TOKENS_SCHEMA, write_tokens
from tasks.workloads.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRow:
    """What both workloads answered to a row.

    Attributes:
        key: column to value.
        answers: of the first and the second workload: output column to value; empty where there is none.
        errors: why there is none; None where there is an answer.
        num_output_tokens: of both.
    """

    key: Mapping[str, str]
    answers: tuple[Mapping[str, Any], Mapping[str, Any]]
    errors: tuple[str | None, str | None]
    num_output_tokens: tuple[int, int]

    @property
    def is_changed(self) -> bool:
        """Whether the two say different things; how sure they are, and why, is not looked at."""
        first, second = ({name: value for name, value in each.items() if _is_said(name)} for each in self.answers)
        return first != second or [error is None for error in self.errors] in ([True, False], [False, True])


def pair_workloads(first: Workload, second: Workload, checkpoint: Path) -> Workload:
    """A workload that asks both.

    Args:
        first, second: with the same key.
        checkpoint: the model's folder.
    Raises:
        WorkloadError: their keys or adapters differ, or one of them makes several requests of a row.
    """
    if [name.lower() for name in first.key] != [name.lower() for name in second.key]:
        raise WorkloadError(
            f"{first.name!r} and {second.name!r} answer different rows: "
            f"their keys are {list(first.key)} and {list(second.key)}"
        )
    if first.adapter != second.adapter:
        raise WorkloadError(f"{first.name!r} and {second.name!r} have different adapters; one batch has one of them")
    codec = TextCodec.load(checkpoint)
    settings = [RequestForm.of(each, codec, None).settings for each in (first, second)]
    for each, of_each in zip((first, second), settings, strict=True):
        if len(of_each) != 1:
            raise WorkloadError(f"{each.name!r} asks {len(of_each)} questions about a row; only single ones compare")
    kind = PairedAnswers(
        kinds=(first.kind, second.kind), settings=(settings[0][0], settings[1][0]), output=second.output
    )
    return replace(second, name=f"{first.name}-and-{second.name}"[:120], kind=kind)


@task(name="pair", retries=0, cache_policy=NO_CACHE, persist_result=False)
def pair_prompts(
    workloads: tuple[Workload, Workload],
    requests: ArtifactRef,
    chosen: ArtifactRef,
    folder: Path,
    checkpoint: Path,
    max_model_len: int,
) -> dict[str, ArtifactRef]:
    """Write the prompts of "both" as one batch; row n of the first is row 2n, of the second row 2n + 1.

    Args:
        workloads: the first and the second.
        requests: of all rows of the first.
        chosen: requests of the second's rows that are compared, numbered from 0.
        folder: where the files are made.
        checkpoint: the model's folder.
        max_model_len: tokens of the longest prompt plus answer.
    Returns:
        the tokens artifacts of "first", "second" and "both".
    Raises:
        ModelError: the tokenizer cannot be used for a workload.
        ArtifactError: the requests are not what their references say, or the folder cannot be written.
    """
    first, second = workloads
    with open_parquet(requests) as file, duckdb.connect() as connection:
        schema = file.schema_arrow
        query = fill_identifiers(statement("compare/take_same_rows"), keys=first.key)
        parameters = {"requests": requests.path, "chosen": chosen.path}
        rows = connection.sql(query, params=parameters).to_arrow_reader(BATCH_ROWS)
        batches = (batch.select(schema.names).cast(schema) for batch in rows)
        of_first = write_parquet(folder / "first-requests.parquet", schema, batches)
    tokens = {
        name: write_tokens(of_each, folder / f"{name}-tokens.parquet", workload, checkpoint, max_model_len)
        for name, of_each, workload in (("first", of_first, first), ("second", chosen, second))
    }
    files = {name: of_each.path for name, of_each in tokens.items()}
    with duckdb.connect() as connection:
        rows = connection.sql(statement("compare/interleave_tokens"), params=files).to_arrow_reader(BATCH_ROWS)
        both = write_parquet(folder / "tokens.parquet", TOKENS_SCHEMA, (batch.cast(TOKENS_SCHEMA) for batch in rows))
    return tokens | {"both": both}


def read_pairs(
    workload: Workload, kind: PairedAnswers, chosen: ArtifactRef, tokens: ArtifactRef, parts: Sequence[ArtifactRef]
) -> list[PairedRow]:
    """Each chosen row with both answers, in order.

    Args:
        workload: whose key names a row.
        kind: of the batch.
        chosen: requests of the rows.
        tokens: of the batch; says which prompts could not be asked.
        parts: all that was answered.
    """
    keys = pq.read_table(chosen.path, columns=list(workload.key)).to_pylist()
    unasked = pq.read_table(tokens.path, columns=["row_id", "error"]).to_pylist()
    errors: dict[int, str | None] = {row["row_id"]: row["error"] for row in unasked}
    answers: dict[int, Mapping[str, Any]] = {}
    counts: dict[int, int] = {}
    for part in parts:
        for row in pq.read_table(part.path).to_pylist():
            number = row["row_id"]
            errors[number], counts[number] = row["error"], row["num_output_tokens"]
            if row["error"] is None:
                answers[number] = _read_columns(kind.kinds[number % 2].written, json.loads(row["answer"]))
    return [
        PairedRow(
            key=key,
            answers=(answers.get(2 * number, {}), answers.get(2 * number + 1, {})),
            errors=(_why(errors, answers, 2 * number), _why(errors, answers, 2 * number + 1)),
            num_output_tokens=(counts.get(2 * number, 0), counts.get(2 * number + 1, 0)),
        )
        for number, key in enumerate(keys)
    ]


def _read_columns(written: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of the output table; those that share one of a part are fields of the JSON object in it."""
    inside = set(written.values())
    if len(inside) == 1 < len(written):
        values = json.loads(values[inside.pop()])
        return {name: values.get(name) for name in written}
    return {name: values.get(name_inside) for name, name_inside in written.items()}


def _why(errors: Mapping[int, str | None], answers: Mapping[int, Any], number: int) -> str | None:
    return None if number in answers else errors.get(number) or "not answered"


def _is_said(name: str) -> bool:
    return name not in ("score", "thinking") and not name.endswith(("_probability", "_probabilities", "_logprobs"))
