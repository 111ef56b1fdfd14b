"""Cuts prompts that do not fit in memory into buckets that do: consecutive ranges of the sorted prompts."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.storage.batches import cut_by, sort_batches
from tasks.storage.plan_file import token_arrays
from tasks.storage.prompt_order import read_prompts


def read_buckets(tokens: pq.ParquetFile, folder: str | Path, bucket_tokens: int) -> Iterator[pa.RecordBatch]:
    """The rows of `read_prompts` bucket by bucket, buckets in order; copies of one prompt may fill several batches.

    Args:
        tokens, folder: read twice; for temporary files.
        bucket_tokens: tokens of a bucket, on average.
    """
    bounds = _choose_bounds(tokens, bucket_tokens)
    rows = sort_batches(_number_buckets(tokens, bounds), "bucket", folder)
    for bucket, pieces in groupby(cut_by(rows, "bucket"), key=lambda batch: batch.column("bucket")[0].as_py()):
        if bucket % 2:  # odd buckets hold copies of one boundary prompt, in the order of the file
            yield from pieces
        else:
            yield pa.concat_batches(pieces)


def _choose_bounds(tokens: pq.ParquetFile, bucket_tokens: int) -> list[bytes]:
    """Sorted boundary prompts, drawn at random, one for about `bucket_tokens` tokens; equal files give equal bounds."""
    rng = np.random.default_rng(0)
    bounds: set[bytes] = set()
    for batch in read_prompts(tokens):
        num_tokens = pc.list_value_length(batch.column("token_ids")).to_numpy()
        chosen = np.flatnonzero(rng.random(batch.num_rows) * bucket_tokens < num_tokens)
        bounds.update(prompt.tobytes() for prompt in token_arrays(batch.column("token_ids").take(pa.array(chosen))))
    return sorted(bounds)


def _number_buckets(tokens: pq.ParquetFile, bounds: list[bytes]) -> Iterator[pa.RecordBatch]:
    """The prompts with a column ``bucket``: 2 n for prompts above n bounds, plus 1 for a prompt equal to a bound."""
    for batch in read_prompts(tokens):
        keys = [prompt.tobytes() for prompt in token_arrays(batch.column("token_ids"))]
        buckets = [bisect_left(bounds, key) + bisect_right(bounds, key) for key in keys]
        yield batch.append_column("bucket", pa.array(buckets, pa.int64()))
