"""Values of any length on disk, apart from the rows they belong to: put in any order and fetched in any other."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from tasks.storage.unnamed_file import UnnamedFile


class BytesStore(UnnamedFile):
    """Values in one file, found by place and size."""

    __slots__ = ("_num_bytes",)

    def __init__(self, folder: str | Path) -> None:
        """Raises `ArtifactError` where the folder cannot be written."""
        super().__init__(folder)
        self._num_bytes = 0

    def append(self, values: pa.LargeBinaryArray | pa.LargeStringArray) -> pa.Int64Array:
        """Where each value lies; null where the value is null.

        Raises:
            ArtifactError: the disk is full.
        """
        _, offsets, data = values.buffers()
        bounds = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1]
        with self._needing_room():
            self._file.write(memoryview(data)[bounds[0] : bounds[-1]] if data is not None else b"")
            self._file.flush()
        places = self._num_bytes + bounds[:-1] - bounds[0]
        self._num_bytes += int(bounds[-1] - bounds[0])
        return pa.array(places, pa.int64(), mask=values.is_null().to_numpy(zero_copy_only=False))

    def fetch(self, places: pa.Int64Array, sizes: pa.Int64Array) -> pa.LargeBinaryArray:
        """The values at these places, null where the place is null."""
        num_bytes = sizes.fill_null(0).to_numpy()
        offsets = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(num_bytes, out=offsets[1:])
        data = bytearray(int(offsets[-1]))
        filled = np.flatnonzero(num_bytes)
        starts, ends = offsets[filled], offsets[filled + 1]
        stored_at = places.fill_null(0).to_numpy()[filled]
        for place, start, end in zip(stored_at.tolist(), starts.tolist(), ends.tolist(), strict=True):
            self._read(memoryview(data)[start:end], place)
        validity = np.packbits(places.is_valid().to_numpy(zero_copy_only=False), bitorder="little")
        buffers = [pa.py_buffer(validity), pa.py_buffer(offsets), pa.py_buffer(data)]
        return pa.Array.from_buffers(pa.large_binary(), len(sizes), buffers)

    def _read(self, target: memoryview, place: int) -> None:
        """One call of the system reads 2 GiB at most."""
        while len(target):
            target = target[os.preadv(self._file.fileno(), [target], place) :]


def limit_bytes(batches: Iterable[pa.RecordBatch], sizes: Sequence[str], most_bytes: int) -> Iterator[pa.RecordBatch]:
    """The same rows, as many at a time as have at most `most_bytes` in the store, or one row.

    Args:
        sizes: columns with the bytes of the values that belong to a row; null for none.
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
