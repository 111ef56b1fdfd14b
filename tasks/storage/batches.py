"""Streams of record batches: from DuckDB, sorted, spooled for a second pass, cut where a column changes."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import islice, pairwise
from pathlib import Path
from tempfile import SpooledTemporaryFile

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasks.storage.artifact import writing

BATCH_ROWS = 1024

MOST_BYTES_IN_MEMORY = 16 << 20
"""Batches of more bytes are sorted, and spooled, on disk."""


def needing_room(folder: str | Path) -> AbstractContextManager[None]:
    """Turn an `OSError` in the block into an `ArtifactError` that names the folder for temporary files."""
    return writing(folder, lambda where, error: f"{where}: no room for temporary files there: {error}")


@contextmanager
def spool(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, folder: str | Path
) -> Iterator[Iterator[pa.RecordBatch]]:
    """Consume all `batches` of a `schema`, then give them again; beyond `MOST_BYTES_IN_MEMORY` they wait in an unnamed
    file in the folder. See `needing_room`."""
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with SpooledTemporaryFile(MOST_BYTES_IN_MEMORY, dir=str(folder)) as file:
        with needing_room(folder), pa.ipc.new_stream(file, schema, options=options) as writer:
            for batch in batches:
                writer.write_batch(batch)
        file.seek(0)
        yield iter(pa.ipc.open_stream(file))


def sort_batches(
    batches: Iterable[pa.RecordBatch], by: str, folder: str | Path, *, hash_columns: Mapping[str, str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of all batches, sorted by a column, stable. One small batch is sorted in memory. Others may be larger
    than memory, so DuckDB sorts them on disk. Raises as `needing_room`, and what `batches` raises.

    Args:
        batches: of one schema, with columns of numbers, texts, bytes, and lists of numbers.
        by: a column of integers, or of bytes, at most a few hundred in a value.
        hash_columns: column to the column with hashes of its values, for columns whose values many rows share: on disk
            each long value is stored once. The result has no hash columns.
    """
    batches = iter(batches)
    hash_columns = hash_columns or {}
    begun = list(islice(batches, 2))
    if sum(batch.nbytes for batch in begun) > MOST_BYTES_IN_MEMORY or len(begun) > 1:
        from tasks.storage.external_sort import sort_on_disk  # imported only when needed

        yield from sort_on_disk(begun, batches, by, folder, hash_columns)
    elif begun:
        yield begun[0].take(pc.sort_indices(begun[0].column(by))).drop_columns(list(hash_columns.values()))


def read_batches(result: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    """The batches of a query's result. Where DuckDB fails after the first, pyarrow raises a plain `OSError` with its
    message; this raises `duckdb.DataError`, which nobody takes for an error of the file to which the batches go."""
    try:
        yield from result
    except OSError as error:
        raise duckdb.DataError(str(error)) from error


def cut_by(batches: Iterable[pa.RecordBatch], by: str) -> Iterator[pa.RecordBatch]:
    """Sorted rows in batches that hold one value of the column `by` (integers from 0); a value may have several."""
    for batch in batches:
        starts = np.flatnonzero(np.diff(batch.column(by).to_numpy(), prepend=-1))
        for start, end in pairwise([*starts.tolist(), batch.num_rows]):
            yield batch.slice(start, end - start)
