"""Numbers the rows of several files consecutively, as those of one file."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.storage.artifact import ArtifactRef, open_parquet, write_parquet
from tasks.storage.batches import BATCH_ROWS
from tasks.storage.schemas import TOKENS_SCHEMA


def find_first_row_ids(files: Sequence[ArtifactRef]) -> list[int]:
    """The number that row 0 of each file gets; a file's row ids may have gaps."""
    last_ids = [pc.max(pq.read_table(ref.path, columns=["row_id"]).column("row_id")).as_py() for ref in files[:-1]]
    return [0, *accumulate(0 if last is None else last + 1 for last in last_ids)]


def count_planned(tokens: ArtifactRef) -> int:
    """The number of rows without error in a file of `TOKENS_SCHEMA`; a plan holds these alone."""
    return int(pq.read_table(tokens.path, columns=["error"]).column("error").null_count)


def write_joined(files: Sequence[ArtifactRef], target: str | Path) -> ArtifactRef:
    """Write `target`: the rows of all files of `TOKENS_SCHEMA`, each sorted by row_id, numbered consecutively. Raises
    `ArtifactError` if a file is not what its reference says."""

    def renumber() -> Iterator[pa.RecordBatch]:
        for ref, first in zip(files, find_first_row_ids(files), strict=True):
            with open_parquet(ref) as file:
                for batch in file.iter_batches(batch_size=BATCH_ROWS):
                    row_ids = pa.array(batch.column("row_id").to_numpy() + first, pa.int64())
                    yield pa.RecordBatch.from_arrays([row_ids, *batch.columns[1:]], schema=TOKENS_SCHEMA)

    return write_parquet(target, TOKENS_SCHEMA, renumber())
