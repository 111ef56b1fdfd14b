"""The prompts of tokens.parquet, sorted by their token ids."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from engine.planning.prefix_tree import sort_rows
from tasks.storage.batches import BATCH_ROWS
from tasks.storage.plan_file import token_arrays

BUCKET_TOKENS = 1_000_000
"""Files with more tokens are cut into buckets of this size on average, and each bucket is sorted in memory."""


def sort_prompts(tokens: pq.ParquetFile, folder: str | Path) -> Iterator[tuple[int, int, npt.NDArray[np.int32]]]:
    """Row id, priority and prompt of all rows without error, sorted by prompt, stable. Raises `ArtifactError` if the
    folder cannot be written.

    Args:
        tokens: of `TOKENS_SCHEMA`; a large file is read twice.
        folder: see `read_buckets`.
    """
    column, groups = tokens.schema_arrow.get_field_index("token_ids"), range(tokens.metadata.num_row_groups)
    num_tokens = sum(tokens.metadata.row_group(group).column(column).num_values for group in groups)
    if num_tokens > BUCKET_TOKENS:
        from tasks.storage.prompt_buckets import read_buckets  # imported only when needed

        buckets = read_buckets(tokens, folder, BUCKET_TOKENS)
    else:
        batches = list(read_prompts(tokens))
        buckets = iter([pa.concat_batches(batches)] if batches else [])
    for bucket in buckets:
        row_ids, priorities = (bucket.column(name).to_pylist() for name in ("row_id", "priority"))
        prompts = token_arrays(bucket.column("token_ids"))
        for row in sort_rows(prompts):
            yield row_ids[row], priorities[row], prompts[row]


def read_prompts(tokens: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    """Row id, prompt and priority of the rows without error."""
    for batch in tokens.iter_batches(batch_size=BATCH_ROWS, columns=["row_id", "token_ids", "error", "priority"]):
        if batch.column("error").null_count < batch.num_rows:
            batch = batch.filter(pc.is_null(batch.column("error")))
        yield batch.select(["row_id", "token_ids", "priority"])
