"""Record batches that are kept on disk for a while."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa

from tasks.storage.unnamed_file import UnnamedFile


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
