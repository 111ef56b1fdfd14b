"""Sorts streams of record batches that are larger than memory, by DuckDB.

DuckDB spills narrow rows to disk, but runs out of memory if rows are wide. So long values wait in a `SpillFile`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from engine.errors import ArtifactError
from sql import statement
from tasks.database.connection import fill_identifiers, set_connection_options
from tasks.database.messages import explain
from tasks.database.opening import raise_plainly
from tasks.storage.batches import BATCH_ROWS, read_batches
from tasks.storage.spill_file import SpillFile

MEMORY_LIMIT = "512MB"
"""DuckDB's memory limit while it sorts."""

SHORT_BYTES = 128
"""Longer values wait in the spill file."""

MOST_LONG_BYTES = 16 << 20
"""Most bytes of long values in a sorted batch."""


def sort_on_disk(
    begun: list[pa.RecordBatch],
    batches: Iterator[pa.RecordBatch],
    by: str,
    folder: str | Path,
    hash_columns: Mapping[str, str],
) -> Iterator[pa.RecordBatch]:
    """See `sort_batches`. `begun` holds the first batches; it is emptied. Long values are in a `SpillFile`, the others
    in DuckDB's temporary files, which it deletes at the end, or if it was killed, when it next writes some."""
    failures: list[BaseException] = []
    options = {"threads": 1, "memory_limit": MEMORY_LIMIT, "temp_directory": str(folder)}
    with SpillFile(folder) as spill, duckdb.connect(":memory:", config=options) as connection:
        rows = _NarrowRows(begun[0].schema, by, spill, hash_columns)
        schema = rows.narrow(begun[0].slice(0, 0)).schema.append(pa.field("arrival", pa.int64()))
        begun.reverse()
        first = (begun.pop() for _ in range(len(begun)))
        arriving = _count_rows(map(rows.narrow, chain(first, batches)), failures)
        try:
            set_connection_options(connection)
            connection.register("arriving", pa.RecordBatchReader.from_batches(schema, arriving))
            sort = fill_identifiers(statement("storage/sort_rows"), by=by)
            ordered = read_batches(connection.sql(sort).to_arrow_reader(BATCH_ROWS))
            yield from map(rows.widen, _limit_bytes(ordered, rows.size_columns))
        except Exception as error:
            if failures:
                raise failures[0] from None
            if not isinstance(error, duckdb.Error):
                raise_plainly(folder, error)
            raise ArtifactError(f"{folder}: no room for temporary files there: {explain(error)}") from error


def _limit_bytes(batches: Iterable[pa.RecordBatch], sizes: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The same rows, in batches of at most `MOST_LONG_BYTES` of spilled values, or of one row. The columns `sizes` have
    the number of bytes of a row's spilled value; null for none."""
    for batch in batches:
        num_bytes = np.zeros(batch.num_rows, np.int64)
        for name in sizes:
            num_bytes += batch.column(name).fill_null(0).to_numpy()
        ends = np.cumsum(num_bytes)
        start = 0
        while start < batch.num_rows:
            before = ends[start - 1] if start else 0
            end = max(start + 1, int(np.searchsorted(ends, before + MOST_LONG_BYTES, side="right")))
            yield batch.slice(start, end - start)
            start = end


def _count_rows(batches: Iterable[pa.RecordBatch], failures: list[BaseException]) -> Iterator[pa.RecordBatch]:
    """The batches with a column ``arrival``. Errors go to `failures`, because DuckDB passes on only their message."""
    num_rows = 0
    try:
        for batch in batches:
            yield batch.append_column("arrival", pa.array(range(num_rows, num_rows + batch.num_rows), pa.int64()))
            num_rows += batch.num_rows
    except BaseException as error:
        failures.append(error)
        raise


class _NarrowRows:
    """Converts rows to narrow ones, and back in any order. A narrow row holds short texts, bytes and lists of numbers
    as bytes, and for long ones the place and size in the spill file. The column `keep` stays as it is."""

    def __init__(self, schema: pa.Schema, keep: str, spill: SpillFile, hash_columns: Mapping[str, str]) -> None:
        self._schema = pa.schema([field for field in schema if field.name not in hash_columns.values()])
        self._spill, self._hash_columns = spill, hash_columns
        self._names = [
            field.name for field in self._schema if field.name != keep and not pa.types.is_primitive(field.type)
        ]
        self.size_columns = [f"{name} size" for name in self._names]

    def narrow(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        hashes = {name: columns.pop(column) for name, column in self._hash_columns.items()}
        for name in self._names:
            values = _as_bytes(columns[name])
            sizes = pc.binary_length(values)
            is_long = pc.fill_null(pc.greater(sizes, SHORT_BYTES), False)
            columns[name] = pc.if_else(is_long, None, values)
            if name in hashes:
                places = self._spill.put_once(values, pc.if_else(is_long, hashes[name], None).to_pylist())
            else:
                places = self._spill.put(pc.if_else(is_long, values, None))
            columns[f"{name} place"] = places
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
    """Texts, bytes, or lists of numbers without nulls, as bytes; the values are not copied."""
    if not pa.types.is_list(values.type):
        return values.cast(pa.large_binary())
    numbers, num_bytes = values.values, values.type.value_type.byte_width
    offsets = (values.offsets.to_numpy().astype(np.int64) + numbers.offset) * num_bytes
    return pa.Array.from_buffers(pa.large_binary(), len(values), [None, pa.py_buffer(offsets), numbers.buffers()[1]])


def _from_bytes(values: pa.LargeBinaryArray, kind: pa.DataType) -> pa.Array:
    """The inverse of `_as_bytes`; the data of `values` must start at offset 0 of its buffer."""
    if not pa.types.is_list(kind):
        return values
    num_bytes = kind.value_type.byte_width
    _, offsets, data = values.buffers()
    bounds = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1] // num_bytes
    numbers = pa.Array.from_buffers(kind.value_type, int(bounds[-1]), [None, data])
    return pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), numbers, kind)
