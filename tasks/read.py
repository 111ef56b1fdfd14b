"""Reads the rows of a workload that have no answer yet into requests.parquet, and the length of earlier answers."""

import hashlib
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
from prefect import task
from prefect.cache_policies import NO_CACHE

from engine.errors import DatabaseError
from sql import statement
from tasks.database.connection import MEMORY_LIMIT, connect, execute, fill_identifiers, restrict_sql, set_option
from tasks.database.messages import explain
from tasks.database.schema import check_requests, check_schema, list_relations
from tasks.runs.source import Source
from tasks.storage.artifact import ArtifactRef, runs_folder, write_parquet
from tasks.storage.batches import BATCH_ROWS, read_batches, sort_batches
from tasks.storage.schemas import NUMBERS
from tasks.workloads.workload import Workload

KEPT_AS_WRITTEN = "build_side_probe_side,join_filter_pushdown"
"""Optimizers that are off while rows are read. The first chooses which side of a join is built in memory by the number
of rows, not by the length of texts, and would hold all texts in memory; without it the right side is built. The second
computes the smallest and the largest id, and fails if one is not UTF-8, which must only be an error of its row."""


@dataclass(frozen=True, slots=True)
class ReadResult:
    """What was read: ``requests.parquet``, the number of its rows, the number of rows that an earlier run answered and
    that have not changed since, why the others are to be answered, with numbers of rows, and how many of these have the
    key of another one and another content."""

    requests: ArtifactRef
    num_selected: int
    num_already_done: int
    reasons: Counter[str]
    num_hidden: int


def requests_schema(workload: Workload) -> pa.Schema:
    """Columns of ``requests.parquet``: row_id, the key, the prompt's other fields, content_key, error, row_priority;
    also open_questions where a row makes several requests, and row_layout where rows have own orders of parts."""
    return pa.schema(
        [
            pa.field("row_id", pa.int64(), nullable=False),
            *(pa.field(name, pa.large_string()) for name in workload.columns),
            pa.field("content_key", pa.string(), nullable=False),
            pa.field("error", pa.large_string()),
            pa.field("row_priority", pa.int64(), nullable=False),
            *([pa.field("open_questions", NUMBERS, nullable=False)] if workload.kind.question_digests else []),
            *([pa.field("row_layout", pa.string())] if workload.row_layouts is not None else []),
        ]
    )


@task(name="read", retries=0, cache_policy=NO_CACHE, persist_result=False, task_run_name="read-{workload.name}")
def read(source: Source, workload: Workload, folder: Path) -> ReadResult:
    """Write ``requests.parquet``: the rows of the workload's query that have no answer for their content yet.

    Rows are sorted by key and stream in batches; what does not fit in memory is spilled to the folder. A row that
    cannot be answered (a NULL, blank or badly encoded key or prompt field, or a reason that the query gives in its
    ``error`` column) has the reason in ``error`` and no text. Keys are text; bytes that are not UTF-8 read as ``?``.
    There are no retries: it waits for a lock itself, and other errors would occur again.

    Args:
        source: answers of other models do not count; with `full`, answered rows are read, too, except for later steps
            of a cascade.
        folder: of the run.
    Raises:
        DatabaseError: no database, locked, a missing table or column, a priority that is no whole number, or a query
            that reads a file it may not; the message says which.
        ArtifactError: the folder cannot be written.
    """
    states, database = Counter[str](), source.database
    with connect(database, read_only=True, memory_limit=MEMORY_LIMIT) as connection:
        set_option(connection, "disabled_optimizers", KEPT_AS_WRITTEN)
        restrict_sql(connection, [runs_folder(database)], source.attach, [workload.requests_sql], temp_directory=folder)
        check_requests(connection, workload, str(database))
        check_schema(connection, workload, str(database))
        try:
            rows = _select_rows(connection, source, workload)
            texts = [name for name in rows.schema.names if name.startswith("text_")]
            open_rows = _take_open(rows, requests_schema(workload), states)
            hash_columns = {name: name.replace("text_", "hash_", 1) for name in texts}
            ordered = sort_batches(open_rows, "sort_key", folder, hash_columns=hash_columns)
            ordered = _count_hidden(ordered, len(workload.key), states)
            path = folder / "requests.parquet"
            requests = write_parquet(path, requests_schema(workload), _number_rows(ordered, workload, texts))
        except (duckdb.DataError, duckdb.ProgrammingError) as error:  # a value that the query cannot compute with
            raise DatabaseError(f"{database}: in the query of workload {workload.name!r}: {explain(error)}") from error
    num_done, num_hidden = states.pop("done", 0), states.pop("hidden", 0)
    return ReadResult(requests, requests.num_rows, num_done, states, num_hidden)


def _select_rows(connection: duckdb.DuckDBPyConnection, source: Source, workload: Workload) -> pa.RecordBatchReader:
    table, choice = workload.output.table, source.choices.get(workload.name)
    needs_answers = not source.full or (choice and choice.role != "first")
    has_answers = needs_answers and table.lower() in list_relations(connection)
    if choice and has_answers:
        table = choice.prepare(connection, workload)
    digests = list(workload.kind.question_digests.values())
    newest = "newest_answers" if has_answers else "newest_answers_none"
    for name in ("macro_bytes_of", "macro_problem_of", "row_layouts", newest):
        execute(connection, f"read/{name}", table=table, keys=workload.key)
    if workload.row_layouts is not None:
        workload.row_layouts.prepare(connection, workload)
    parameters: Mapping[str, Any] = {
        "requests_sql": workload.requests_sql,
        "keys": list(workload.key),
        "fields": workload.hashed_fields,
        "has_priority": bool(workload.priority),
        "may_be_empty": list(workload.prompt.may_be_empty),
        "workload_digest": workload.row_digest,
        "questions": digests,
        "model_digest": source.model_digest,
    }
    sha256_of = f"sha256_of_{secrets.token_hex(8)}"  # a unique name, because all connections to a file share functions
    blob, text = duckdb.sqltypes.BLOB, duckdb.sqltypes.VARCHAR
    connection.create_function(sha256_of, _hash_values, [blob], text, type="arrow", null_handling="special")
    checked, priority = statement("read/checked_requests"), workload.priority or "row_priority"
    query = fill_identifiers(checked, columns=workload.columns, priority=priority, sha256_of=sha256_of)
    return connection.sql(choice.narrow(query) if choice else query, params=parameters).to_arrow_reader(BATCH_ROWS)


def _hash_values(values: pa.ChunkedArray) -> pa.Array:
    """As DuckDB's ``sha256``, but six times as fast where the processor has instructions for it."""
    digests = [None if value is None else hashlib.sha256(value).hexdigest() for value in values.to_pylist()]
    return pa.array(digests, pa.string())


def _take_open(rows: pa.RecordBatchReader, schema: pa.Schema, states: Counter[str]) -> Iterator[pa.RecordBatch]:
    """The rows that are not done, with the columns that `schema` is made of; `states` counts all rows."""
    unused = {"state", "open_questions", "row_layout"}.difference(schema.names)
    for found in read_batches(rows):
        states.update(found.column("state").to_pylist())
        batch = found.filter(pc.not_equal(found.column("state"), "done"))
        if not batch.num_rows:
            continue
        columns = {name: batch.column(name) for name in batch.schema.names if name not in unused}
        if "open_questions" in columns:
            columns["open_questions"] = columns["open_questions"].cast(NUMBERS)
        yield pa.RecordBatch.from_pydict(columns)


def _count_hidden(rows: Iterable[pa.RecordBatch], num_keys: int, states: Counter[str]) -> Iterator[pa.RecordBatch]:
    """Sorted rows as they are; `states` counts as "hidden" those with the key of the row before and another content."""
    last: list[pa.RecordBatch] = []
    for batch in rows:
        own = batch.select([*batch.schema.names[:num_keys], "content_key"])
        both = pa.concat_batches([*last, own])
        *has_same_key, has_same_content = (pc.equal(column[1:], column[:-1]) for column in both.columns)
        states["hidden"] += pc.sum(pc.and_not(reduce(pc.and_, has_same_key), has_same_content)).as_py() or 0
        last = [both[-1:]]
        yield batch


def _number_rows(rows: Iterable[pa.RecordBatch], workload: Workload, texts: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Turn sorted rows (key_*, `texts`, content_key, error, row_priority) into those of `requests_schema`. The query
    may spell a column in other case than the workload, so keys and texts go by their position."""
    schema, num_rows = requests_schema(workload), 0
    for batch in rows:
        columns = {name: batch.column(name) for name in schema.names if name in batch.schema.names}
        columns |= zip(workload.hashed_fields, map(batch.column, texts), strict=True)
        columns |= zip(workload.key, batch.columns[: len(workload.key)], strict=True)
        columns["row_id"] = pa.array(range(num_rows, num_rows + batch.num_rows), pa.int64())
        num_rows += batch.num_rows
        yield pa.record_batch([columns[field.name].cast(field.type) for field in schema], schema=schema)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLength:
    """The expected length of an answer: the mean of earlier ones, or without any, the most that the workload allows."""

    num_tokens: int
    num_earlier_answers: int = 0

    @property
    def expected_output_tokens(self) -> int | None:
        """The parameter of `engine.Request`; None without earlier answers."""
        return self.num_tokens if self.num_earlier_answers else None


def read_answer_length(database: str | Path, workload: Workload) -> AnswerLength:
    """The mean length, rounded, of answers of the workload's newest runs, or of all in its table if it is new or was
    changed; without any, the most tokens that it allows."""
    most, table = workload.kind.max_answer_tokens, workload.output.table
    if workload.kind.is_decoded:
        with connect(database, read_only=True) as connection:
            if {table.lower(), "runs"} <= list_relations(connection).keys():
                found = execute(connection, "read/mean_answer_tokens", {"digest": workload.digest}, table=table)
                (mean, num_answers), *_ = found.fetchall()
                if num_answers:
                    return AnswerLength(num_tokens=min(max(1, round(mean)), most), num_earlier_answers=num_answers)
    return AnswerLength(num_tokens=most)
