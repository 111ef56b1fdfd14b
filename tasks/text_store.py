"""Texts on disk, apart from the rows they belong to: put in any order, each once, and fetched in any other."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasks.unnamed_file import UnnamedFile

KNOWN_TEXTS = 1 << 20
"""Texts whose place is remembered, about 250 bytes each; beyond it all are forgotten, and what comes again is stored
again."""


class TextStore(UnnamedFile):
    """Texts in one file, found by place and size."""

    __slots__ = ("_known", "_num_bytes")

    def __init__(self, folder: str | Path) -> None:
        """Raises `ArtifactError` where the folder cannot be written."""
        super().__init__(folder)
        self._known: dict[str, int] = {}  # hash to place
        self._num_bytes = 0

    def put(self, texts: pa.LargeStringArray, hashes: list[str]) -> tuple[pa.Int64Array, pa.Int64Array]:
        """Where each text lies and how many bytes it has; null where the text is null.

        Args:
            hashes: one a text; texts of one hash are the same.
        Raises:
            ArtifactError: the disk is full.
        """
        if len(self._known) > KNOWN_TEXTS:
            self._known.clear()
        sizes = pc.binary_length(texts)
        places: list[int | None] = []
        new_rows: list[int] = []
        for row, (size, digest) in enumerate(zip(sizes.to_pylist(), hashes, strict=True)):
            place = None if size is None else self._known.get(digest)
            if place is None and size is not None:
                place = self._known[digest] = self._num_bytes
                self._num_bytes += size
                new_rows.append(row)
            places.append(place)
        self._append(texts.take(pa.array(new_rows, pa.int64())))
        return pa.array(places, pa.int64()), sizes

    def get(self, places: pa.Int64Array, sizes: pa.Int64Array) -> pa.LargeStringArray:
        """The texts at these places, null where the place is null; what several rows share is read once."""
        num_bytes = sizes.fill_null(0).to_numpy()
        starts = np.where(num_bytes > 0, places.fill_null(0).to_numpy(), -1)  # an empty text shares its place
        unique, first_rows, rows = np.unique(starts, return_index=True, return_inverse=True)
        offsets = np.zeros(len(unique) + 1, np.int64)
        np.cumsum(num_bytes[first_rows], out=offsets[1:])
        values = bytearray(int(offsets[-1]))
        for place, start, end in zip(unique.tolist(), offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            self._read(memoryview(values)[start:end], place)
        texts = pa.LargeStringArray.from_buffers(len(unique), pa.py_buffer(offsets), pa.py_buffer(values))
        return texts.take(pa.array(rows, pa.int64(), mask=places.is_null().to_numpy(zero_copy_only=False)))

    def _append(self, texts: pa.LargeStringArray) -> None:
        if not len(texts):
            return
        _, offsets, values = texts.buffers()
        start, end = np.frombuffer(offsets, np.int64)[[texts.offset, texts.offset + len(texts)]]
        with self._needing_room():
            self._file.write(memoryview(values)[start:end] if values is not None else b"")
            self._file.flush()

    def _read(self, target: memoryview, place: int) -> None:
        """One call of the system reads 2 GiB at most."""
        while len(target):
            target = target[os.preadv(self._file.fileno(), [target], place) :]
