"""Streams of record batches that are larger than memory: kept on disk for a while, or sorted there."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from tasks.unnamed_file import UnnamedFile

RUN_BYTES = 128 << 20
"""Of rows that are sorted in memory at a time. A merge holds an open file and a batch of each run besides."""

BATCH_BYTES = 1 << 20
"""Of a batch of a run, about."""

ROW_BYTES = 512
"""What a row takes besides its values while a run is sorted: a key and a place in a list."""

MOST_BATCH_ROWS = 1024

KeysOf = Callable[[pa.RecordBatch], list[bytes]]


class Spool(UnnamedFile):
    """Batches of one schema on disk, to be written once and read once."""

    __slots__ = ("_schema",)

    def __init__(self, folder: str | Path, schema: pa.Schema) -> None:
        """Raises `ArtifactError` where the folder cannot be written."""
        super().__init__(folder)
        self._schema = schema

    def write(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Raises `ArtifactError` where the disk is full."""
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with self._needing_room():
            with pa.ipc.new_stream(self._file, self._schema, options=options) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            self._file.flush()

    def read(self) -> Iterator[pa.RecordBatch]:
        self._file.seek(0)
        with pa.ipc.open_stream(self._file) as reader:
            yield from reader


def sort_batches(
    batches: Iterable[pa.RecordBatch], keys_of: KeysOf, folder: str | Path, *, run_bytes: int = RUN_BYTES
) -> Iterator[pa.RecordBatch]:
    """The rows of all batches in the order of their keys' bytes; rows of equal keys in the order of arrival.

    What is not more than `run_bytes` is sorted in memory; beyond that sorted runs lie on disk and are merged.

    Args:
        batches: of one schema.
        keys_of: the key of each row of a batch.
        folder: on whose file system the runs lie.
    Raises:
        ArtifactError: the folder cannot be written.
    """
    with ExitStack() as files:
        runs: list[Spool] = []
        pending: list[pa.RecordBatch] = []
        num_pending_bytes = 0
        for batch in batches:
            if pending and num_pending_bytes >= run_bytes:
                runs.append(files.enter_context(Spool(folder, batch.schema)))
                runs[-1].write(_sort_run(pending, keys_of))
                num_pending_bytes = 0
            pending.append(batch)
            num_pending_bytes += batch.nbytes + ROW_BYTES * batch.num_rows
        last = _sort_run(pending, keys_of)
        yield from _merge_runs([*(run.read() for run in runs), last], keys_of) if runs else last


def _sort_run(batches: list[pa.RecordBatch], keys_of: KeysOf) -> Iterator[pa.RecordBatch]:
    """The rows of some batches as sorted batches of about `BATCH_BYTES`; empties the list."""
    keys = [key for batch in batches for key in keys_of(batch)]
    if not keys:
        return
    order = pa.array(sorted(range(len(keys)), key=keys.__getitem__), pa.int64())
    del keys
    rows = pa.concat_batches(batches)
    batches.clear()
    num_rows = max(1, min(MOST_BATCH_ROWS, BATCH_BYTES * len(order) // max(1, rows.nbytes)))
    for start in range(0, len(order), num_rows):
        yield rows.take(order[start : start + num_rows])


@dataclass(slots=True, kw_only=True)
class _Head:
    """What is in memory of a run: a batch, its rows' keys, and the first row that has not been taken."""

    batch: pa.RecordBatch
    keys: list[bytes]
    start: int = 0


def _merge_runs(runs: list[Iterator[pa.RecordBatch]], keys_of: KeysOf) -> Iterator[pa.RecordBatch]:
    """Batches of `MOST_BATCH_ROWS`; equal keys come from the earlier run first."""
    pending: list[pa.RecordBatch] = []
    num_pending_rows = 0
    for rows in _merge_slices(runs, keys_of):
        pending.append(rows)
        num_pending_rows += rows.num_rows
        if num_pending_rows < MOST_BATCH_ROWS:
            continue
        merged = pa.concat_batches(pending)
        starts = range(0, num_pending_rows - MOST_BATCH_ROWS + 1, MOST_BATCH_ROWS)
        yield from (merged.slice(start, MOST_BATCH_ROWS) for start in starts)
        pending = [merged.slice(starts[-1] + MOST_BATCH_ROWS)]
        num_pending_rows = pending[0].num_rows
    if num_pending_rows:
        yield pa.concat_batches(pending)


def _merge_slices(runs: list[Iterator[pa.RecordBatch]], keys_of: KeysOf) -> Iterator[pa.RecordBatch]:
    """The rows in order, as many at a time as are known to come before all that is still on disk.

    Those are the rows up to the last one of the batch that ends first. Rows of its key may follow in its own run, and
    come before those of later runs.
    """
    sources = [(run, _Head(batch=batch, keys=keys_of(batch))) for run in runs if (batch := next(run, None)) is not None]
    while sources:
        ending = min(range(len(sources)), key=lambda place: sources[place][1].keys[-1])
        bound = sources[ending][1].keys[-1]
        slices: list[pa.RecordBatch] = []
        keys: list[bytes] = []
        for place, (_, head) in enumerate(sources):
            bisect = bisect_right if place <= ending else bisect_left
            end = bisect(head.keys, bound, head.start)
            if end > head.start:
                slices.append(head.batch.slice(head.start, end - head.start))
                keys += head.keys[head.start : end]
                head.start = end
        # Sorting what is a few sorted pieces is a merge, and keeps the order of equal keys.
        order = sorted(range(len(keys)), key=keys.__getitem__)
        yield pa.concat_batches(slices).take(pa.array(order, pa.int64()))
        run, _ = sources[ending]
        batch = next(run, None)
        sources[ending : ending + 1] = [] if batch is None else [(run, _Head(batch=batch, keys=keys_of(batch)))]
