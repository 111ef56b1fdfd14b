"""Runs whose steps a test makes up, and what a report reads of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.database.connection import connect
from tasks.report_page.facts import RunFacts, read_run, read_run_facts
from tasks.storage.artifact import describe_parquet

CHUNK = 100
CONFIG = {"engine": {"max_num_batched_tokens": CHUNK, "block_size": 16}}

Step = tuple[int, int, int, float]
"""(partition, tokens, requests waiting, milliseconds)"""


def replace_steps(night: Any, run_id: str, steps: Sequence[Step], **same: int) -> None:
    """Give a run these steps, numbered within their partition; all tokens decode, unless `same` says otherwise."""
    numbers: dict[int, int] = {}
    night.sql("delete from steps")
    with connect(night.path) as connection:
        for partition, num_tokens, num_waiting, duration_ms in steps:
            step = numbers[partition] = numbers.get(partition, -1) + 1
            row = {
                "run_id": run_id,
                "partition": partition,
                "step": step,
                "num_decode_tokens": num_tokens,
                "num_suffix_tokens": 0,
                "num_prefix_tokens": 0,
                "num_kv_blocks_used": num_tokens,
                "num_prefix_kv_blocks": num_tokens // 2,
                "num_request_kv_blocks": num_tokens // 4,
                "num_cached_kv_blocks": num_tokens // 8,
                "num_kv_blocks_total": 200,
                "num_running_requests": 1,
                "num_waiting_requests": num_waiting,
                "num_finished_requests": 1,
                "num_preempted_requests": 0,
                "duration_ms": duration_ms,
            } | same
            names = ", ".join(f"${name}" for name in row)
            connection.execute(f"insert into steps ({', '.join(row)}) values ({names})", row)


def read_facts(night: Any, run_id: str | None = None, plan: Path | None = None) -> RunFacts:
    with connect(night.path, read_only=True) as connection:
        return read_run_facts(connection, read_run(connection, run_id), describe_parquet(plan) if plan else None)
