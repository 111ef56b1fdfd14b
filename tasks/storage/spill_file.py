"""An unnamed file for values of any length that do not fit in memory.

The file is on the file system of a given folder. No other process can open it, and it vanishes with this process.
"""

import os
from pathlib import Path
from tempfile import TemporaryFile
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from engine.errors import ArtifactError
from tasks.storage.batches import needing_room

KNOWN_TEXTS = 1 << 20
"""Most texts whose place `SpillFile.put_once` remembers, about 250 bytes each. Beyond it all places are forgotten, and
texts that come again are stored again."""


class SpillFile:
    """Stores values, and reads them by place and size in any order. Use it as a context manager. Raises
    `ArtifactError`, which names the folder, if it cannot be written, the disk is full, or it ends before a value."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = folder
        self._num_bytes = 0
        self._known: dict[str, int] = {}  # hash of a text to its place
        with needing_room(self._folder):
            self._file = TemporaryFile(dir=folder)  # noqa: SIM115 - closed in __exit__

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def put(self, values: pa.LargeBinaryArray | pa.LargeStringArray) -> pa.Int64Array:
        """Append values; returns the place of each, null for null."""
        _, offsets, data = values.buffers()
        bounds = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1]
        with needing_room(self._folder):
            self._file.write(memoryview(data)[bounds[0] : bounds[-1]] if data is not None else b"")
            self._file.flush()
        places = self._num_bytes + bounds[:-1] - bounds[0]
        self._num_bytes += int(bounds[-1] - bounds[0])
        return pa.array(places, pa.int64(), mask=values.is_null().to_numpy(zero_copy_only=False))

    def put_once(self, texts: pa.LargeBinaryArray | pa.LargeStringArray, hashes: list[str | None]) -> pa.Int64Array:
        """Append the texts that are not in the file yet, by hashes that tell equal texts, None for a text that is not
        stored; returns the place of each, null for null."""
        if len(self._known) > KNOWN_TEXTS:
            self._known.clear()
        places: list[int | None] = []
        new_rows: list[int] = []
        end = self._num_bytes
        for row, (size, digest) in enumerate(zip(pc.binary_length(texts).to_pylist(), hashes, strict=True)):
            if size is None or digest is None:
                places.append(None)
                continue
            if digest not in self._known:
                self._known[digest] = end
                end += size
                new_rows.append(row)
            places.append(self._known[digest])
        self.put(texts.take(pa.array(new_rows, pa.int64())))
        return pa.array(places, pa.int64())

    def get(self, places: pa.Int64Array, sizes: pa.Int64Array) -> pa.LargeBinaryArray:
        """The values at these places, null for null; a value that several rows share is read once."""
        num_bytes = sizes.fill_null(0).to_numpy()
        # An empty value has the same place as the value stored after it, so it gets a place of its own, -1.
        starts = np.where(num_bytes > 0, places.fill_null(0).to_numpy(), -1)
        stored_at, first_rows, rows = np.unique(starts, return_index=True, return_inverse=True)
        offsets = np.zeros(len(stored_at) + 1, np.int64)
        np.cumsum(num_bytes[first_rows], out=offsets[1:])
        data = bytearray(int(offsets[-1]))
        for place, start, end in zip(stored_at.tolist(), offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            self._read(memoryview(data)[start:end], place)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        values = pa.Array.from_buffers(pa.large_binary(), len(stored_at), buffers)
        return values.take(pa.array(rows, pa.int64(), mask=places.is_null().to_numpy(zero_copy_only=False)))

    def _read(self, target: memoryview, place: int) -> None:
        while len(target):  # one system call reads at most 2 GiB
            num_bytes = os.preadv(self._file.fileno(), [target], place)
            if not num_bytes:
                raise ArtifactError(f"{self._folder}: a temporary file there has no byte {place:,}: it was cut")
            target, place = target[num_bytes:], place + num_bytes
