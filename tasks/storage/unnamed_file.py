"""A file without a name, for what does not fit in memory.

It lies on the file system of a folder, nobody else can open it, and it is gone with the process however it ends.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Self

from engine.errors import ArtifactError


class UnnamedFile:
    """The file, open to write and read. A context manager, or close it."""

    __slots__ = ("_file", "_folder")

    def __init__(self, folder: str | Path) -> None:
        """Raises `ArtifactError` where the folder cannot be written."""
        self._folder = folder
        with self._needing_room():
            self._file = TemporaryFile(dir=folder)  # noqa: SIM115 - closed in __exit__

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @contextmanager
    def _needing_room(self) -> Iterator[None]:
        """An error of the system, such as a full disk, is an `ArtifactError` that names the folder."""
        try:
            yield
        except ArtifactError:
            raise
        except OSError as error:
            raise ArtifactError(f"{self._folder}: no room for temporary files there: {error}") from error
