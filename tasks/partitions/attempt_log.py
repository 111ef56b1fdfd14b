"""How often the pieces of a partition were tried, kept where it outlives the process that tries."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from engine.errors import ArtifactError, WorkerError
from tasks.database.connection import describe_write_error
from tasks.partitions.piece import Piece

MOST_STARTS = 4
"""How many processes in a row may take a partition and end before they try a row of it."""


class AttemptLog:
    """Files in ``attempts/`` of a run folder, one a piece, one byte an attempt.

    An attempt is noted before it begins: one that ends with its process counts as well. Nothing is fsynced, since an
    attempt that a power loss wipes out is only made once more.

    Args:
        upload_file: called with each file that has changed.
    """

    __slots__ = ("_folder", "_partition", "_upload_file")

    def __init__(
        self, run_folder: str | Path, partition: int, upload_file: Callable[[Path], None] = lambda path: None
    ) -> None:
        self._folder = Path(run_folder) / "attempts"
        self._partition = partition
        self._upload_file = upload_file

    def count(self, piece: Piece) -> int:
        try:
            return self._path(piece).stat().st_size
        except FileNotFoundError:
            return 0

    def note(self, piece: Piece) -> None:
        """Count one more; `ArtifactError` where that cannot be written."""
        self._add(self._path(piece))
        self._empty(self._starts)

    def note_start(self) -> None:
        """Count a process that takes the partition, until an attempt is noted.

        Raises:
            WorkerError: too many in a row have come no further: it is hardly for the rows.
            ArtifactError: it cannot be written.
        """
        if self._add(self._starts) > MOST_STARTS:
            raise WorkerError(
                f"partition {self._partition}: {MOST_STARTS} processes in a row ended before they tried a row; "
                "do they have the memory that the model takes?"
            )

    def forget(self, piece: Piece) -> None:
        """Begin to count anew: the attempts so far say nothing about the rows."""
        self._empty(self._path(piece))

    @property
    def _starts(self) -> Path:
        return self._folder / f"starts-{self._partition:05d}"

    def _add(self, path: Path) -> int:
        """One byte more; returns how many there are."""
        return self._write(path, "ab", b".")

    def _empty(self, path: Path) -> None:
        self._write(path, "wb", b"")

    def _write(self, path: Path, mode: Literal["ab", "wb"], content: bytes) -> int:
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            with open(path, mode) as file:
                file.write(content)
                size = file.tell()
        except OSError as error:
            raise ArtifactError(describe_write_error(path, error)) from error
        self._upload_file(path)
        return size

    def _path(self, piece: Piece) -> Path:
        return self._folder / f"part-{self._partition:05d}-{piece.first}-{piece.last}"
