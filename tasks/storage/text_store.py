"""Texts on disk, apart from the rows they belong to: put in any order, each once, and fetched in any other."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasks.storage.bytes_store import BytesStore

KNOWN_TEXTS = 1 << 20
"""Texts whose place is remembered, about 250 bytes each; beyond it all are forgotten, and what comes again is stored
again."""


class TextStore(BytesStore):
    """Texts in one file, each once, found by place and size."""

    __slots__ = ("_known",)

    def __init__(self, folder: str | Path) -> None:
        """Raises `ArtifactError` where the folder cannot be written."""
        super().__init__(folder)
        self._known: dict[str, int] = {}  # hash to place

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
        end = self._num_bytes
        for row, (size, digest) in enumerate(zip(sizes.to_pylist(), hashes, strict=True)):
            place = None if size is None else self._known.get(digest)
            if place is None and size is not None:
                place = self._known[digest] = end
                end += size
                new_rows.append(row)
            places.append(place)
        self.append(texts.take(pa.array(new_rows, pa.int64())))
        return pa.array(places, pa.int64()), sizes

    def get(self, places: pa.Int64Array, sizes: pa.Int64Array) -> pa.LargeStringArray:
        """The texts at these places, null where the place is null; what several rows share is read once."""
        num_bytes = sizes.fill_null(0).to_numpy()
        starts = np.where(num_bytes > 0, places.fill_null(0).to_numpy(), -1)  # an empty text shares its place
        unique, first_rows, rows = np.unique(starts, return_index=True, return_inverse=True)
        texts = self.fetch(pa.array(unique), pa.array(num_bytes[first_rows])).view(pa.large_string())
        return texts.take(pa.array(rows, pa.int64(), mask=places.is_null().to_numpy(zero_copy_only=False)))
