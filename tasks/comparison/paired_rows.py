"""Joins the prompts of two workloads over the same rows in one batch, and separates their answers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
from prefect import task
from prefect.cache_policies import NO_CACHE

from engine.errors import WorkloadError
from sql import statement
from tasks.answers.kind import AnswerKind
from tasks.answers.pair import PairedAnswers
from tasks.database.connection import fill_identifiers
from tasks.prompts.prompt import RequestForm
from tasks.prompts.text_codec import TextCodec
from tasks.storage.artifact import ArtifactRef, open_parquet, write_parquet
from tasks.storage.batches import BATCH_ROWS
from tasks.storage.schemas import TOKENS_SCHEMA
from tasks.tokenize import write_tokens
from tasks.workloads.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRow:
    """A row: its key, and of the first and the second workload the answer (output column to value; empty without one),
    why there is none (None if there is one), and the number of output tokens."""

    key: Mapping[str, str]
    answers: tuple[Mapping[str, Any], Mapping[str, Any]]
    errors: tuple[str | None, str | None]
    num_output_tokens: tuple[int, int]

    @property
    def is_changed(self) -> bool:
        """Whether the two answers differ; probabilities, scores and thoughts are ignored."""
        first, second = ({name: value for name, value in each.items() if _is_compared(name)} for each in self.answers)
        return first != second or [error is None for error in self.errors] in ([True, False], [False, True])


def pair_workloads(first: Workload, second: Workload, checkpoint: Path) -> Workload:
    """A workload whose rows make the requests of both.

    Args:
        first, second: with the same key.
    Raises:
        WorkloadError: their keys or adapters differ, or one gives embeddings.
        ModelError: the model cannot answer one of them.
    """
    for each in (first, second):
        if each.kind.mode == "embed":
            raise WorkloadError(f"{each.name!r} gives embeddings, which cannot be compared row by row")
    if [name.lower() for name in first.key] != [name.lower() for name in second.key]:
        raise WorkloadError(
            f"{first.name!r} and {second.name!r} answer different rows: "
            f"their keys are {list(first.key)} and {list(second.key)}"
        )
    if first.adapter != second.adapter:
        raise WorkloadError(f"{first.name!r} and {second.name!r} have different adapters; one batch has one of them")
    first, second = first.bind(checkpoint), second.bind(checkpoint)
    codec = TextCodec.load(checkpoint)
    settings = tuple(form for each in (first, second) for form in RequestForm.of(each, codec, None).settings)
    kind = PairedAnswers(kinds=(first.kind, second.kind), settings=settings, output=second.output)
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
    """Write the prompts of both workloads as one batch, with the row ids of `PairedAnswers`. Returns the tokens
    artifacts of "first", "second" and "both".

    Args:
        requests: of all rows of the first workload.
        chosen: requests of the second's rows that are compared, numbered from 0.
        max_model_len: tokens of the longest prompt plus answer.
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
    numbers = {"num_first": len(first.kind.suffixes), "num_second": len(second.kind.suffixes)}
    files: dict[str, Any] = {name: of_each.path for name, of_each in tokens.items()}
    with duckdb.connect() as connection:
        rows = connection.sql(statement("compare/interleave_tokens"), params=files | numbers).to_arrow_reader(
            BATCH_ROWS
        )
        both = write_parquet(folder / "tokens.parquet", TOKENS_SCHEMA, (batch.cast(TOKENS_SCHEMA) for batch in rows))
    return tokens | {"both": both}


def read_pairs(
    workload: Workload, kind: PairedAnswers, chosen: ArtifactRef, tokens: ArtifactRef, parts: Sequence[ArtifactRef]
) -> list[PairedRow]:
    """Each chosen row with both answers, in order.

    Args:
        kind, tokens, parts: of the batch: its kind of answer, the errors of its prompts, and all its answers.
        chosen: requests of the rows.
    """
    keys = pq.read_table(chosen.path, columns=list(workload.key)).to_pylist()
    sides = [(_Side(), _Side()) for _ in keys]
    for row in pq.read_table(tokens.path, columns=["row_id", "error"]).to_pylist():
        number, side, _ = kind.place(row["row_id"])
        sides[number][side].errors[row["row_id"]] = row["error"] or "not answered"
    for part in parts:
        for row in pq.read_table(part.path).to_pylist():
            number, side, _ = kind.place(row["row_id"])
            sides[number][side].take(row)
    return [
        PairedRow(
            key=key,
            answers=(_read_columns(kind.kinds[0], first), _read_columns(kind.kinds[1], second)),
            errors=(first.error, second.error),
            num_output_tokens=(first.num_output_tokens, second.num_output_tokens),
        )
        for key, (first, second) in zip(keys, sides, strict=True)
    ]


@dataclass(slots=True)
class _Side:
    """The answers of one workload to a row so far; `errors` holds those of requests without an answer."""

    values: dict[str, Any] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    num_output_tokens: int = 0

    def take(self, row: Mapping[str, Any]) -> None:
        """Add a row of a part."""
        self.num_output_tokens += row["num_output_tokens"]
        if row["error"] is None:
            self.errors.pop(row["row_id"], None)
            self.values |= json.loads(row["answer"])
        else:
            self.errors[row["row_id"]] = row["error"]

    @property
    def error(self) -> str | None:
        """Why requests have no answer; None if all have one."""
        return "; ".join(dict.fromkeys(self.errors.values())) or None


def _read_columns(kind: AnswerKind, side: _Side) -> dict[str, Any]:
    """The values of the output table's columns; extracted columns are fields of a JSON object."""
    if not side.values:
        return {}
    given = {each.name for each in kind.part_fields}
    written = {name: name_inside for name, name_inside in kind.written.items() if name_inside in given}
    if kind.insert_statement == "write/insert_extracted":
        values = json.loads(side.values["answer"])
        return {name: values.get(name) for name in written}
    return {name: side.values.get(name_inside) for name, name_inside in written.items()}


def _is_compared(name: str) -> bool:
    return name not in ("score", "thinking") and not name.endswith(("_probability", "_probabilities", "_logprobs"))
