"""Streams of record batches that are larger than memory, sorted by DuckDB.

DuckDB spills narrow rows to disk and runs out of memory where rows are wide. So long values wait in a `SpillFile`.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, pairwise
from pathlib import Path

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from engine.errors import ArtifactError
from sql import statement
from tasks.database.connection import fill_identifiers
from tasks.database.messages import explain
from tasks.storage.plan_file import token_arrays
from tasks.storage.spill_file import SpillFile

MEMORY_LIMIT = "512MB"
"""Of DuckDB while it sorts."""

BATCH_ROWS = 1024

SHORT_BYTES = 128
"""A longer value waits in the spill file."""

MOST_LONG_BYTES = 16 << 20
"""Of the long values of a sorted batch."""


def sort_batches(
    batches: Iterable[pa.RecordBatch], by: str, folder: str | Path, *, memory_limit: str = MEMORY_LIMIT
) -> Iterator[pa.RecordBatch]:
    """The rows of all batches in the order of a column; rows that are equal there in the order of arrival.

    What does not fit in memory lies in the folder: long values in a `SpillFile`, the rest in files of DuckDB. DuckDB
    deletes its files at the end, and files that killed processes left there when it next needs some.

    Args:
        batches: of one schema, of numbers, texts, bytes, and lists of numbers.
        by: a column of integers or of bytes, none longer than a few hundred.
        memory_limit: of DuckDB, as in "512MB".
    Raises:
        ArtifactError: the folder cannot be written, or the disk is full.
        Exception: what `batches` raises.
    """
    batches = iter(batches)
    first = next(batches, None)
    if first is None:
        return
    failures: list[BaseException] = []
    with SpillFile(folder) as spill, duckdb.connect(":memory:", config={"threads": 1}) as connection:
        rows = _NarrowRows(first.schema, by, spill)
        schema = rows.narrow(first.slice(0, 0)).schema.append(pa.field("arrival", pa.int64()))
        arriving = _count_rows(map(rows.narrow, chain([first], batches)), failures)
        try:
            connection.execute(statement("settings/set_arrow_buffers"))
            connection.execute(statement("settings/set_progress_bar"))
            connection.execute(statement("settings/set_memory_limit"), {"memory_limit": memory_limit})
            connection.execute(statement("settings/set_temp_directory"), {"folder": str(folder)})
            connection.register("arriving", pa.RecordBatchReader.from_batches(schema, arriving))
            ordered = connection.sql(fill_identifiers(statement("storage/sort_rows"), by=by)).to_arrow_reader(
                BATCH_ROWS
            )
            yield from map(rows.widen, limit_bytes(ordered, rows.size_columns, MOST_LONG_BYTES))
        except duckdb.Error as error:
            if failures:
                raise failures[0] from None
            raise ArtifactError(f"{folder}: no room for temporary files there: {explain(error)}") from error


def cut_by(batches: Iterable[pa.RecordBatch], by: str) -> Iterator[pa.RecordBatch]:
    """Sorted rows in batches of one value each in a column of integers from 0; a value may have several."""
    for batch in batches:
        starts = np.flatnonzero(np.diff(batch.column(by).to_numpy(), prepend=-1))
        for start, end in pairwise([*starts.tolist(), batch.num_rows]):
            yield batch.slice(start, end - start)


def limit_bytes(batches: Iterable[pa.RecordBatch], sizes: Sequence[str], most_bytes: int) -> Iterator[pa.RecordBatch]:
    """The same rows, in batches of at most `most_bytes` of spilled values, or of one row.

    Args:
        sizes: columns with the bytes of a row's spilled values; null for none.
        most_bytes: of all these columns together.
    """
    for batch in batches:
        num_bytes = np.zeros(batch.num_rows, np.int64)
        for name in sizes:
            num_bytes += batch.column(name).fill_null(0).to_numpy()
        ends = np.cumsum(num_bytes)
        start = 0
        while start < batch.num_rows:
            before = ends[start - 1] if start else 0
            end = max(start + 1, int(np.searchsorted(ends, before + most_bytes, side="right")))
            yield batch.slice(start, end - start)
            start = end


def _count_rows(batches: Iterable[pa.RecordBatch], failures: list[BaseException]) -> Iterator[pa.RecordBatch]:
    """The batches with a column arrival. Keeps what they raise: DuckDB passes on the message alone."""
    num_rows = 0
    try:
        for batch in batches:
            yield batch.append_column("arrival", pa.array(range(num_rows, num_rows + batch.num_rows), pa.int64()))
            num_rows += batch.num_rows
    except BaseException as error:
        failures.append(error)
        raise


class _NarrowRows:
    """Makes rows narrow, and wide again in any order.

    A narrow row holds its short texts, bytes and lists of numbers as bytes; of a long one it holds place and size in
    the spill file. The column `keep` stays as it is.
    """

    def __init__(self, schema: pa.Schema, keep: str, spill: SpillFile) -> None:
        self._schema, self._spill = schema, spill
        self._names = [field.name for field in schema if field.name != keep and not pa.types.is_primitive(field.type)]
        self.size_columns = [f"{name} size" for name in self._names]

    def narrow(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        for name in self._names:
            values = _as_bytes(columns[name])
            sizes = pc.binary_length(values)
            is_long = pc.fill_null(pc.greater(sizes, SHORT_BYTES), False)
            columns[name] = pc.if_else(is_long, None, values)
            columns[f"{name} place"] = self._spill.put(pc.if_else(is_long, values, None))
            columns[f"{name} size"] = pc.if_else(is_long, sizes, None)
        return pa.RecordBatch.from_pydict(columns)

    def widen(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The inverse of `narrow`."""
        columns = []
        for field in self._schema:
            values = batch.column(field.name)
            if field.name in self._names:
                long = self._spill.get(batch.column(f"{field.name} place"), batch.column(f"{field.name} size"))
                values = _from_bytes(pc.coalesce(values, long), field.type)
            columns.append(values.cast(field.type))
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def _as_bytes(values: pa.Array) -> pa.LargeBinaryArray:
    """Texts or bytes, or lists of numbers without a null, as bytes; without a copy of the values."""
    if not pa.types.is_list(values.type):
        return values.cast(pa.large_binary())
    numbers, num_bytes = values.values, values.type.value_type.byte_width
    offsets = (values.offsets.to_numpy().astype(np.int64) + numbers.offset) * num_bytes
    return pa.Array.from_buffers(pa.large_binary(), len(values), [None, pa.py_buffer(offsets), numbers.buffers()[1]])


def _from_bytes(values: pa.LargeBinaryArray, kind: pa.DataType) -> pa.Array:
    """The inverse of `_as_bytes`; `values` begin at the beginning of their buffers."""
    if not pa.types.is_list(kind):
        return values
    num_bytes = kind.value_type.byte_width
    _, offsets, data = values.buffers()
    bounds = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1] // num_bytes
    numbers = pa.Array.from_buffers(kind.value_type, int(bounds[-1]), [None, data])
    return pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), numbers, kind)


BUCKET_TOKENS = 1_000_000
"""Of a bucket on average; the largest of a million are about ten times as large."""


def sort_prompts(
    tokens: pq.ParquetFile, folder: str | Path, *, bucket_tokens: int = BUCKET_TOKENS
) -> Iterator[tuple[int, int, npt.NDArray[np.int32]]]:
    """Row id, priority and prompt of all rows without error; of equal prompts in the order of the file.

    Args:
        tokens: of `TOKENS_SCHEMA`; read twice.
        folder: where that lies which does not fit in memory.
        bucket_tokens: see `BUCKET_TOKENS`.
    Raises:
        ArtifactError: the folder cannot be written.
    """
    bounds = _choose_bounds(tokens, bucket_tokens)
    rows = sort_batches(_number_buckets(tokens, bounds), "bucket", folder)
    for bucket, pieces in groupby(cut_by(rows, "bucket"), key=_bucket_of):
        # Odd buckets hold copies of one bound and need no sort.
        for batch in pieces if bucket % 2 else [pa.concat_batches(list(pieces))]:
            row_ids, priorities = (batch.column(name).to_pylist() for name in ("row_id", "priority"))
            prompts = token_arrays(batch.column("token_ids"))
            keys = [prompt.tobytes() for prompt in prompts]
            for row in sorted(range(len(keys)), key=keys.__getitem__):
                yield row_ids[row], priorities[row], prompts[row]


def _choose_bounds(tokens: pq.ParquetFile, bucket_tokens: int) -> list[bytes]:
    """Prompts in order: one of about `bucket_tokens` tokens, the same whenever the prompts are the same."""
    rng = np.random.default_rng(0)
    bounds: set[bytes] = set()
    for batch in _read_prompts(tokens):
        num_tokens = pc.list_value_length(batch.column("token_ids")).to_numpy()
        chosen = np.flatnonzero(rng.random(batch.num_rows) * bucket_tokens < num_tokens)
        bounds.update(prompt.tobytes() for prompt in token_arrays(batch.column("token_ids").take(pa.array(chosen))))
    return sorted(bounds)


def _number_buckets(tokens: pq.ParquetFile, bounds: list[bytes]) -> Iterator[pa.RecordBatch]:
    """The prompts with a column bucket: twice the number of bounds below, and one more where it is a bound itself."""
    for batch in _read_prompts(tokens):
        keys = [prompt.tobytes() for prompt in token_arrays(batch.column("token_ids"))]
        buckets = [bisect_left(bounds, key) + bisect_right(bounds, key) for key in keys]
        yield batch.append_column("bucket", pa.array(buckets, pa.int64()))


def _read_prompts(tokens: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    """Rows without error."""
    for batch in tokens.iter_batches(batch_size=BATCH_ROWS, columns=["row_id", "token_ids", "error", "priority"]):
        if batch.column("error").null_count < batch.num_rows:
            batch = batch.filter(pc.is_null(batch.column("error")))
        yield batch.select(["row_id", "token_ids", "priority"])


def _bucket_of(batch: pa.RecordBatch) -> int:
    bucket: int = batch.column("bucket")[0].as_py()
    return bucket
