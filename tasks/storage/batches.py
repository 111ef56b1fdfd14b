"""Streams of record batches: sorted, kept for a second time, cut where a column changes."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice, pairwise
from pathlib import Path
from tempfile import SpooledTemporaryFile

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from engine.errors import ArtifactError

BATCH_ROWS = 1024

MEMORY_LIMIT = "512MB"
"""Of DuckDB while it sorts."""


MOST_BYTES_IN_MEMORY = 16 << 20
"""Of batches that are sorted, or kept by `spool`; more of them lie on disk."""


@contextmanager
def needing_room(folder: str | Path) -> Iterator[None]:
    """Raise `ArtifactError`, which names the folder, where it cannot be written or the disk is full."""
    try:
        yield
    except ArtifactError:
        raise
    except OSError as error:
        raise ArtifactError(f"{folder}: no room for temporary files there: {error}") from error


@contextmanager
def spool(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, folder: str | Path
) -> Iterator[Iterator[pa.RecordBatch]]:
    """The same batches, once all of them have been consumed; what does not fit in memory lies in a file without a name.

    Args:
        schema: of every batch.
        folder: of the file, see `needing_room`.
    """
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with SpooledTemporaryFile(MOST_BYTES_IN_MEMORY, dir=str(folder)) as file:
        with needing_room(folder), pa.ipc.new_stream(file, schema, options=options) as writer:
            for batch in batches:
                writer.write_batch(batch)
        file.seek(0)
        yield iter(pa.ipc.open_stream(file))


def sort_batches(
    batches: Iterable[pa.RecordBatch],
    by: str,
    folder: str | Path,
    *,
    memory_limit: str = MEMORY_LIMIT,
    hash_columns: Mapping[str, str] | None = None,
) -> Iterator[pa.RecordBatch]:
    """The rows of all batches in the order of a column; rows that are equal there in the order of arrival.

    Several batches, or a large one, are sorted in the folder, by DuckDB, as they may be larger than memory.

    Args:
        batches: of one schema, of numbers, texts, bytes, and lists of numbers.
        by: a column of integers or of bytes, none longer than a few hundred.
        memory_limit: of DuckDB, as in "512MB".
        hash_columns: of columns whose values many rows share, those with the values' hashes, which are left out of the
            rows; a value that is long is stored once.
    Raises:
        ArtifactError: the folder cannot be written, or the disk is full.
        Exception: what `batches` raises.
    """
    batches = iter(batches)
    hash_columns = hash_columns or {}
    begun = list(islice(batches, 2))
    if sum(batch.nbytes for batch in begun) > MOST_BYTES_IN_MEMORY or len(begun) > 1:
        from tasks.storage.external_sort import sort_on_disk  # a small table is one batch

        yield from sort_on_disk(begun, batches, by, folder, memory_limit, hash_columns)
    elif begun:
        yield begun[0].take(pc.sort_indices(begun[0].column(by))).drop_columns(list(hash_columns.values()))


def cut_by(batches: Iterable[pa.RecordBatch], by: str) -> Iterator[pa.RecordBatch]:
    """Sorted rows in batches of one value each in a column of integers from 0; a value may have several."""
    for batch in batches:
        starts = np.flatnonzero(np.diff(batch.column(by).to_numpy(), prepend=-1))
        for start, end in pairwise([*starts.tolist(), batch.num_rows]):
            yield batch.slice(start, end - start)
