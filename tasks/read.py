"""Read a workload's requests without an answer, checked, as Parquet; and how long its earlier answers were."""

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
from prefect import task
from prefect.cache_policies import NO_CACHE

from sql import statement
from tasks.database.connection import MEMORY_LIMIT, connect, fill_identifiers, restrict_sql
from tasks.database.schema import check_requests, check_schema, list_relations
from tasks.storage.artifact import ArtifactRef, runs_folder, write_parquet
from tasks.storage.batches import sort_batches
from tasks.workloads.workload import Workload

if TYPE_CHECKING:
    from tasks.cascades.row_choice import RowChoice

BATCH_ROWS = 1024

NO_ANSWERS = "read/newest_answers_none"

OPEN_QUESTIONS = pa.list_(pa.field("item", pa.int32(), nullable=False))
"""Numbers of the questions that are to be asked, of a row that makes several requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult:
    """What there is to do.

    Attributes:
        requests: of ``requests.parquet``.
        num_selected: rows in it, those with an error included.
        num_already_done: rows that an earlier run answered and that have not changed since.
        num_errors: of the selected rows, those that cannot be answered.
    """

    requests: ArtifactRef
    num_selected: int
    num_already_done: int
    num_errors: int


def requests_schema(workload: Workload) -> pa.Schema:
    """Columns of ``requests.parquet``: row_id, the key, the prompt's other fields, content_key, error, row_priority;
    open_questions where a row makes several requests; row_layout where rows may have an order of parts of their own."""
    return pa.schema(
        [
            pa.field("row_id", pa.int64(), nullable=False),
            *(pa.field(name, pa.large_string()) for name in workload.columns),
            pa.field("content_key", pa.string(), nullable=False),
            pa.field("error", pa.large_string()),
            pa.field("row_priority", pa.int64(), nullable=False),
            *([pa.field("open_questions", OPEN_QUESTIONS, nullable=False)] if workload.kind.question_digests else []),
            *([pa.field("row_layout", pa.string())] if workload.row_layouts is not None else []),
        ]
    )


def read_requests(
    database: str | Path,
    workload: Workload,
    model_digest: str,
    run_folder: str | Path,
    *,
    full: bool = False,
    attach: Mapping[str, str] | None = None,
    choice: "RowChoice | None" = None,
) -> ReadResult:
    """Write ``requests.parquet``: one row a row of the workload's query that has no answer for its content yet.

    Rows come in the order of their key, whatever the order in the database, and stream through in batches; what does
    not fit in memory on the way lies in the run folder. A row that cannot be answered (a NULL, blank or badly encoded
    key or prompt field, or a reason the query itself gives in its ``error`` column) is there with the reason in
    ``error`` and without its text. Keys are text; bytes in them that are not UTF-8 read as ``?``.

    Args:
        model_digest: of the checkpoint; another model means another answer.
        full: select rows that are answered, too.
        attach: what the query may read beside the database; see `tasks.database.connection.restrict_sql`.
        choice: the rows among them that a step of a cascade answers, which `full` does not change but for the first.

    Raises:
        DatabaseError: no database, locked, or a table or column is missing, or the priority is no whole
            number, or the query reads a file that it may not; the message says which.
        ArtifactError: the run folder cannot be written.
    """
    counts = {"done": 0, "errors": 0}
    with connect(database, read_only=True, memory_limit=MEMORY_LIMIT) as connection:
        connection.execute(statement("settings/set_joins_as_written"))
        restrict_sql(connection, [runs_folder(database)], attach or {}, temp_directory=run_folder)
        check_requests(connection, workload, str(database))
        check_schema(connection, workload, str(database))
        rows = _select_rows(connection, workload, model_digest, full, choice)
        hash_columns = {name: f"hash_{name}" for name in _text_columns(rows)}
        unsorted = _list_columns(_drop_done(rows, counts), requests_schema(workload))
        ordered = sort_batches(unsorted, "sort_key", run_folder, hash_columns=hash_columns)
        path = Path(run_folder) / "requests.parquet"
        requests = write_parquet(path, requests_schema(workload), _number_rows(ordered, workload))
    return ReadResult(
        requests=requests,
        num_selected=requests.num_rows,
        num_already_done=counts["done"],
        num_errors=counts["errors"],
    )


def _select_rows(
    connection: duckdb.DuckDBPyConnection, workload: Workload, model_digest: str, full: bool, choice: "RowChoice | None"
) -> pa.RecordBatchReader:
    table = workload.output.table
    has_answers = (not full or (choice and choice.role != "first")) and table.lower() in list_relations(connection)
    if choice and has_answers:
        table = choice.prepare(connection, workload)
    digests = list(workload.kind.question_digests.values())
    newest = f"read/newest_{'decisions' if digests else 'answers'}" if has_answers else NO_ANSWERS
    for name in ("read/macro_bytes_of", "read/macro_problem_of", "read/row_layouts", newest):
        connection.execute(fill_identifiers(statement(name), table=table, keys=workload.key))
    if workload.row_layouts is not None:
        workload.row_layouts.prepare(connection, workload)
    parameters: Mapping[str, Any] = {
        "requests_sql": workload.requests_sql,
        "keys": list(workload.key),
        "fields": [name for name in workload.columns if name in workload.prompt.fields],
        "may_be_empty": list(workload.prompt.may_be_empty),
        "workload_digest": workload.row_digest,
        "questions": digests,
        "model_digest": model_digest,
    }
    query = fill_identifiers(
        statement("read/checked_requests"),
        columns=workload.columns,
        priority=workload.priority or "row_priority",
        sha256_of=_create_sha256(connection),
    )
    return connection.sql(choice.narrow(query) if choice else query, params=parameters).to_arrow_reader(BATCH_ROWS)


def _create_sha256(connection: duckdb.DuckDBPyConnection) -> str:
    """Give SQL a `_hash_values`; returns its name, a new one, since all connections to a file share their functions."""
    name = f"sha256_of_{secrets.token_hex(8)}"
    parameters = [duckdb.sqltypes.BLOB]
    connection.create_function(
        name, _hash_values, parameters, duckdb.sqltypes.VARCHAR, type="arrow", null_handling="special"
    )
    return name


def _hash_values(values: pa.ChunkedArray) -> pa.Array:
    """What DuckDB's ``sha256`` gives, six times as fast where the processor has instructions for it."""
    return pa.array(
        [None if value is None else hashlib.sha256(value).hexdigest() for value in values.to_pylist()], pa.string()
    )


def _drop_done(rows: pa.RecordBatchReader, counts: dict[str, int]) -> Iterator[pa.RecordBatch]:
    for batch in rows:
        undone = batch.filter(pc.invert(batch.column("is_done")))
        counts["done"] += batch.num_rows - undone.num_rows
        counts["errors"] += undone.num_rows - undone.column("error").null_count
        if undone.num_rows:
            yield undone


def _list_columns(rows: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The columns that `schema` is made of, with a column hash_* for each text_*."""
    unused = {"hashes", "is_done", "open_questions", "row_layout"}.difference(schema.names)
    for batch in rows:
        columns = {name: batch.column(name) for name in batch.schema.names if name not in unused}
        if "open_questions" in columns:
            columns["open_questions"] = columns["open_questions"].cast(OPEN_QUESTIONS)
        texts, hashes = _text_columns(batch), batch.column("hashes").flatten()
        for number, name in enumerate(texts):
            columns[f"hash_{name}"] = hashes.take(pa.array(range(number, len(hashes), len(texts))))
        yield pa.RecordBatch.from_pydict(columns)


def _text_columns(rows: pa.RecordBatch | pa.RecordBatchReader) -> list[str]:
    """One for each field of the prompt, in its order, with the capitals that the query gives the column's name."""
    return [name for name in rows.schema.names if name.startswith("text_")]


def _number_rows(rows: Iterable[pa.RecordBatch], workload: Workload) -> Iterator[pa.RecordBatch]:
    """Turn sorted rows (key_*, text_*, content_key, error, row_priority) into those of `requests_schema`."""
    schema = requests_schema(workload)
    fields = [name for name in workload.columns if name in workload.prompt.fields]
    num_rows = 0
    for batch in rows:
        texts = {name: batch.column(text) for name, text in zip(fields, _text_columns(batch), strict=True)}
        keys = dict(zip(workload.key, batch.columns[: len(workload.key)], strict=True))
        own = {name: batch.column(name) for name in schema.names if name in batch.schema.names}
        columns = {**own, **texts, **keys}
        columns["row_id"] = pa.array(range(num_rows, num_rows + batch.num_rows), pa.int64())
        num_rows += batch.num_rows
        yield pa.record_batch([columns[field.name].cast(field.type) for field in schema], schema=schema)


read = task(name="read", retries=0, cache_policy=NO_CACHE, persist_result=False)(read_requests)
"""`read_requests` as a step of a flow: it waits for a lock itself, and any other error would come again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLength:
    """How long an answer is taken to be.

    Attributes:
        num_tokens: of every answer.
        num_earlier_answers: whose mean it is; 0 if none exist and it is the most that the workload allows.
    """

    num_tokens: int
    num_earlier_answers: int

    @property
    def expected_output_tokens(self) -> int | None:
        """What a request is told of it (`engine.Request`); None where no earlier answer says anything."""
        return self.num_tokens if self.num_earlier_answers else None


def read_answer_length(database: str | Path, workload: Workload) -> AnswerLength:
    """The mean of the workload's earlier answers, rounded, else the most tokens that one may have."""
    most, mean, num_answers = workload.kind.max_answer_tokens, None, 0
    if workload.kind.is_decoded:
        with connect(database, read_only=True) as connection:
            if workload.output.table.lower() in list_relations(connection):
                query = fill_identifiers(statement("read/mean_answer_tokens"), table=workload.output.table)
                mean, num_answers = cast(tuple[float | None, int], connection.execute(query).fetchone())
    if mean is None:
        return AnswerLength(num_tokens=most, num_earlier_answers=0)
    return AnswerLength(num_tokens=min(max(1, round(mean)), most), num_earlier_answers=num_answers)
