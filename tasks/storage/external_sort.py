"""Streams of record batches that are larger than memory, sorted by DuckDB.

Its sort spills narrow rows to disk, and runs out of memory where they are wide. So long values lie apart meanwhile.
"""

from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa

from engine.errors import ArtifactError
from sql import statement
from tasks.database.connection import explain, fill_identifiers
from tasks.storage.bytes_store import BytesStore, limit_bytes
from tasks.storage.narrow_rows import NarrowRows

MEMORY_LIMIT = "512MB"
"""Of DuckDB while it sorts."""

BATCH_ROWS = 1024

MOST_LONG_BYTES = 16 << 20
"""Of the long values of a sorted batch."""


def sort_batches(
    batches: Iterable[pa.RecordBatch], by: str, folder: str | Path, *, memory_limit: str = MEMORY_LIMIT
) -> Iterator[pa.RecordBatch]:
    """The rows of all batches in the order of a column; rows that are equal there in the order of arrival.

    What does not fit in memory lies in the folder: long values in an unnamed file, the rest in files of DuckDB, which
    deletes them at the end, and those that killed processes left there when it next needs some.

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
    with BytesStore(folder) as store, duckdb.connect(":memory:", config={"threads": 1}) as connection:
        rows = NarrowRows(first.schema, by, store)
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
