"""The files of one partition in the run folder: attempts at its pieces, parts with answers, step records."""

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from engine.completion import Completion
from engine.execution.step_record import StepRecord
from engine.planning.plan import Plan
from tasks.partitions.part import answer_batch, step_batch
from tasks.prompts.text_codec import TextCodec
from tasks.runs.infer_job import InferJob, JobMember
from tasks.runs.progress import PartitionProgress
from tasks.storage.artifact import ArtifactRef, list_whole, write_parquet, writing


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A range of a partition's distinct prompts, numbered group by group; both ends are included."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class AttemptLog:
    """Counts attempts in files in ``attempts/`` of the run folder: one file for each piece, one byte for each attempt.
    An attempt is noted before it begins, so it counts even if the process dies. The files are not fsynced: an attempt
    that a power loss erases is only made once more. `upload_file` is called with each changed file."""

    run_folder: Path
    partition: int
    upload_file: Callable[[Path], None] = lambda path: None

    def count(self, piece: Piece) -> int:
        try:
            return self._path(piece).stat().st_size
        except FileNotFoundError:
            return 0

    def note(self, piece: Piece) -> None:
        """Count one attempt."""
        self.write(self._path(piece), "ab", b".")
        self.write(self.starts, "wb")

    def forget(self, piece: Piece) -> None:
        """Set the count to 0: the rows have answers, or the attempts so far failed for another reason than the rows."""
        self.write(self._path(piece), "wb")

    @property
    def starts(self) -> Path:
        """Its bytes count the processes that took the partition since the last attempt, see `tasks.workers.starts`."""
        return self.run_folder / "attempts" / f"starts-{self.partition:05d}"

    def write(self, path: Path, mode: Literal["ab", "wb"], content: bytes = b"") -> int:
        """Append `content` to `path` or replace it, by `mode`; returns its size. Raises `ArtifactError`. See `open`."""
        with writing(path):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with open(path, mode) as file:
                file.write(content)
                size = file.tell()
        self.upload_file(path)
        return size

    def _path(self, piece: Piece) -> Path:
        return self.run_folder / "attempts" / f"part-{self.partition:05d}-{piece.first}-{piece.last}"


WORKER_VARIABLE = "BATCHLOOM_WORKER"
"""Environment variable with the name of this process's engine in the step log: its number on the host, which a
replacement process keeps. Without it, the name is host and process id."""


class PartitionWork:
    """Answers and step records of a `partition` on disk: ``part-XXXXX*.parquet`` in ``parts/`` and ``steps/`` of each
    member's run folder. Answers go to the run of their workload; each run gets all step records. `upload_file` is
    called with each file that is written.

    Attributes:
        title: the partition's name in the log.
        attempts: counts the attempts at its pieces, across processes.
        parts: references of the parts of all members.
        answered: int64, ascending: ids in the plan of the rows in the parts, with answers or errors.
        num_failed: of these, rows with errors.
        progress: the counts that are shown while the run lasts.
    """

    def __init__(self, partition: int, job: InferJob, upload_file: Callable[[Path], None]) -> None:
        self.partition, self.job, self._upload_file = partition, job, upload_file
        self.title = f"{job.title}, partition {partition}"
        self.attempts = AttemptLog(job.first.run_folder, partition, upload_file)
        self._num_files = self._num_steps = self.num_failed = 0
        self.answered: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self.parts: list[ArtifactRef] = []
        self.progress = PartitionProgress(job.first.run_folder, partition)
        folders = [(member.run_folder / "steps", member.run_folder / "parts") for member in job.members]
        while any((folder / self._name(self._num_files)).exists() for folder in chain(*folders)):
            self._num_files += 1
        names = [self._name(number) for number in range(self._num_files)]
        for member, places in zip(job.members, folders, strict=True):
            steps, parts = (list_whole(place / name for name in names) for place in places)
            self._num_steps = max(self._num_steps, sum(ref.num_rows for ref in steps))
            for part in parts:
                self._count(part, pq.read_table(part.path, columns=["row_id", "error"]), member)

    def keep(
        self,
        completions: Sequence[Completion],
        rows: Plan,
        codec: TextCodec | None,
        steps: Sequence[StepRecord],
        ended_at: datetime,
    ) -> None:
        """Write completions and steps, if any; they are durable when this returns. Raises `ArtifactError` if the run
        folder cannot be written.

        Args:
            completions, rows, codec, steps, ended_at: see `answer_batch` and `step_batch`.
        """
        owners = self.job.find_members(np.array([int(each.request_id) for each in completions], np.int64)).tolist()
        name = self._name(self._num_files)
        worker = os.environ.get(WORKER_VARIABLE) or f"{platform.node()}:{os.getpid()}"
        records = step_batch(self.partition, steps, self._num_steps, worker, ended_at) if steps else None
        for number, member in enumerate(self.job.members):
            if records is not None:
                self._write(member.run_folder / "steps" / name, records)
            own = [each for each, owner in zip(completions, owners, strict=True) if owner == number]
            if own:
                answers = answer_batch(own, rows, member.workload, codec, member.first_row_id)
                self._count(self._write(member.run_folder / "parts" / name, answers), answers, member)
        self._num_steps += len(steps)
        self._num_files += bool(steps or completions)

    def _write(self, path: Path, rows: pa.RecordBatch) -> ArtifactRef:
        written = write_parquet(path, rows.schema, [rows])
        self._upload_file(path)
        return written

    def _count(self, part: ArtifactRef, rows: pa.RecordBatch | pa.Table, member: JobMember) -> None:
        self.parts.append(part)
        self.answered = np.union1d(self.answered, rows.column("row_id").to_numpy() + member.first_row_id)
        self.num_failed += pc.count(rows.column("error")).as_py()
        self.progress.settle(len(self.answered), self.num_failed)

    def _name(self, number: int) -> str:
        """The name of the part, and of the step records beside it, that `keep` writes as number `number`."""
        return f"part-{self.partition:05d}{f'-{number:04d}' if number else ''}.parquet"
