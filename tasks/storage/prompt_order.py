"""The prompts of a file in the order of their tokens, bucket by bucket."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.storage.batches import BATCH_ROWS, cut_by, sort_batches
from tasks.storage.plan_file import token_arrays

BUCKET_TOKENS = 1_000_000
"""Of a bucket on average; the largest of a million are about ten times as large."""


def sort_prompts(
    tokens: pq.ParquetFile, folder: str | Path, *, bucket_tokens: int = BUCKET_TOKENS
) -> Iterator[tuple[int, int, npt.NDArray[np.int32]]]:
    """Row id, priority and prompt of all rows without error; of equal prompts in the order of the file.

    Args:
        tokens: of `TOKENS_SCHEMA`; read twice.
        folder: where that lies which does not fit in memory.
        bucket_tokens: see `BUCKET_TOKENS`.
    Raises:
        ArtifactError: the folder cannot be written.
    """
    bounds = _choose_bounds(tokens, bucket_tokens)
    rows = sort_batches(_number_buckets(tokens, bounds), "bucket", folder)
    for bucket, pieces in groupby(cut_by(rows, "bucket"), key=_bucket_of):
        # Odd buckets hold copies of one bound and need no sort.
        for batch in pieces if bucket % 2 else [pa.concat_batches(list(pieces))]:
            row_ids, priorities = (batch.column(name).to_pylist() for name in ("row_id", "priority"))
            prompts = token_arrays(batch.column("token_ids"))
            keys = [prompt.tobytes() for prompt in prompts]
            for row in sorted(range(len(keys)), key=keys.__getitem__):
                yield row_ids[row], priorities[row], prompts[row]


def _choose_bounds(tokens: pq.ParquetFile, bucket_tokens: int) -> list[bytes]:
    """Prompts in order: one of about `bucket_tokens` tokens, the same whenever the prompts are the same."""
    rng = np.random.default_rng(0)
    bounds: set[bytes] = set()
    for batch in _read_prompts(tokens):
        num_tokens = pc.list_value_length(batch.column("token_ids")).to_numpy()
        chosen = np.flatnonzero(rng.random(batch.num_rows) * bucket_tokens < num_tokens)
        bounds.update(prompt.tobytes() for prompt in token_arrays(batch.column("token_ids").take(pa.array(chosen))))
    return sorted(bounds)


def _number_buckets(tokens: pq.ParquetFile, bounds: list[bytes]) -> Iterator[pa.RecordBatch]:
    """The prompts with a column bucket: twice the number of bounds below, and one more where it is a bound itself."""
    for batch in _read_prompts(tokens):
        keys = [prompt.tobytes() for prompt in token_arrays(batch.column("token_ids"))]
        buckets = [bisect_left(bounds, key) + bisect_right(bounds, key) for key in keys]
        yield batch.append_column("bucket", pa.array(buckets, pa.int64()))


def _read_prompts(tokens: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    """Rows without error."""
    for batch in tokens.iter_batches(batch_size=BATCH_ROWS, columns=["row_id", "token_ids", "error", "priority"]):
        if batch.column("error").null_count < batch.num_rows:
            batch = batch.filter(pc.is_null(batch.column("error")))
        yield batch.select(["row_id", "token_ids", "priority"])


def _bucket_of(batch: pa.RecordBatch) -> int:
    bucket: int = batch.column("bucket")[0].as_py()
    return bucket
