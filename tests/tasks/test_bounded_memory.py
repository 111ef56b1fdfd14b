"""A plan of what is several times larger than the memory it takes, and its partitions one after the other."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tasks.storage.artifact import write_parquet
from tasks.storage.plan_file import list_tokens
from tasks.storage.schemas import TOKENS_SCHEMA

NUM_ROWS, SHARE_DEGREE, PREFIX_TOKENS, OWN_TOKENS = 70_000, 7, 1100, 100
MOST_GROWTH_MB = 300
"""The tokens alone are 336 MB."""

STAGES = """
import sys
from benchmarks.measuring.peak_memory import peak_resident_gb
from tasks.storage.artifact import describe_parquet
from tasks.storage.plan_file import read_partition
from tasks.storage.plan_file import read_plan_summary
from tasks import plan_prefix
from tasks.storage import prompt_order

tokens = describe_parquet(sys.argv[1])
before = peak_resident_gb()
plan_prefix.RANGE_TOKENS, prompt_order.BUCKET_TOKENS = 2_000_000, 200_000
plan = plan_prefix.write_plan(tokens, sys.argv[2], "exact", 200_000, 48)
summary = read_plan_summary(plan)
num_rows = sum(read_partition(plan, partition).num_rows for partition in summary.dispatch_order)
print(num_rows, summary.num_groups, summary.sharing.num_processed_tokens, round(1000 * (peak_resident_gb() - before)))
"""


@pytest.mark.slow
def test_a_plan_does_not_hold_the_table(tmp_path: Path) -> None:
    write_parquet(tmp_path / "tokens.parquet", TOKENS_SCHEMA, _token_batches())
    command = [sys.executable, "-c", STAGES, str(tmp_path / "tokens.parquet"), str(tmp_path / "plan.parquet")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0, done.stderr
    num_rows, num_groups, num_processed_tokens, growth_mb = map(int, done.stdout.split())
    num_documents = NUM_ROWS // SHARE_DEGREE
    assert (num_rows, num_groups) == (NUM_ROWS, num_documents)
    assert num_processed_tokens == num_documents * PREFIX_TOKENS + NUM_ROWS * OWN_TOKENS
    assert growth_mb < MOST_GROWTH_MB


def _token_batches() -> Iterator[pa.RecordBatch]:
    """Rows of a document far apart; documents differ in their first token, and so do its rows' own parts."""
    num_documents = NUM_ROWS // SHARE_DEGREE
    base = np.random.default_rng(3).integers(0, 32_000, PREFIX_TOKENS + OWN_TOKENS, dtype=np.int32)
    for first in range(0, NUM_ROWS, 2000):
        rows = np.arange(first, first + 2000)
        shifts = (rows % num_documents * 7919 % 32_000).astype(np.int32)
        tokens = (base + shifts[:, None]) % 32_000
        tokens[:, PREFIX_TOKENS] = rows // num_documents
        yield pa.record_batch(
            [
                pa.array(rows),
                list_tokens(list(tokens)),
                pa.nulls(len(rows), pa.string()),
                pa.array(np.zeros_like(rows)),
            ],
            schema=TOKENS_SCHEMA,
        )
