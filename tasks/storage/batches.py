"""Streams of record batches: sorted, cut where a column changes, held to so many bytes."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

BATCH_ROWS = 1024

MEMORY_LIMIT = "512MB"
"""Of DuckDB while it sorts."""


def sort_batches(
    batches: Iterable[pa.RecordBatch], by: str, folder: str | Path, *, memory_limit: str = MEMORY_LIMIT
) -> Iterator[pa.RecordBatch]:
    """The rows of all batches in the order of a column; rows that are equal there in the order of arrival.

    Several batches are sorted in the folder, by DuckDB, as they may be larger than memory.

    Args:
        batches: of one schema, of numbers, texts, bytes, and lists of numbers.
        by: a column of integers or of bytes, none longer than a few hundred.
        memory_limit: of DuckDB, as in "512MB".
    Raises:
        ArtifactError: the folder cannot be written, or the disk is full.
        Exception: what `batches` raises.
    """
    batches = iter(batches)
    first, second = next(batches, None), next(batches, None)
    if first is None:
        return
    if second is None:
        yield first.take(pc.sort_indices(first.column(by)))
        return
    from tasks.storage.external_sort import sort_on_disk  # a small table is one batch

    yield from sort_on_disk(chain([first, second], batches), by, folder, memory_limit)


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
