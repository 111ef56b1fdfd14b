"""A night of snippets, stage by stage, for ``python -m benchmarks.scale``.

Workload: BatchLLM's case 1 (section 6.2.2), synthetic, in a real DuckDB file: each document is stored once and has 7
requests; a prompt has about 1,100 tokens up to the end of its document and 400 of its own, in words of Python's
language reference. The stages are the night's own, with the shipped workload: read, tokenize, plan (which sorts and
cuts partitions), and gather, which reads every partition as a worker would.

Checked: every row is there once, prompts gathered from partitions are the tokenized ones, and the plan saves the
expected tokens.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measuring.model_folder import find_model
from benchmarks.measuring.wrong_answer import WrongAnswerError
from engine.kernels import cdiv
from tasks.database.connection import connect
from tasks.database.schema import create_schema
from tasks.partitions.failing import read_spread_rows
from tasks.plan_prefix import write_plan
from tasks.prompts.prompt import build_prompt_format
from tasks.prompts.text_codec import TextCodec
from tasks.read import read
from tasks.runs.source import Source
from tasks.storage.artifact import describe_parquet
from tasks.storage.plan_file import read_partition, read_plan_summary
from tasks.tokenize import write_tokens
from tasks.workloads.workload import load_workload

SHARE_DEGREE, PREFIX_TOKENS, OWN_TOKENS = 7, 1100, 400
PARTITION_TOKENS, ANSWER_TOKENS, MAX_MODEL_LEN = 500_000, 48, 8192
SENTENCE_WORDS, NUM_SENTENCES, BATCH_ROWS = 20, 4096, 4096
STAGES = ("read", "tokenize", "plan", "gather")


class TextMaker:
    """Texts of about a given number of tokens, put together from sentences of real words."""

    def __init__(self, codec: TextCodec) -> None:
        rng = np.random.default_rng(7)
        words = re.findall(r"[A-Za-z]{2,}", " ".join(topics.values()))
        picks = rng.integers(0, len(words), (NUM_SENTENCES, SENTENCE_WORDS))
        self._sentences = [" ".join(words[i] for i in row) + "." for row in picks.tolist()]
        sample = codec.encode([" ".join(self._sentences)], add_special_tokens=False)
        self._tokens_each = len(sample[0]) / NUM_SENTENCES
        form = build_prompt_format(load_workload("snippets").prompt, codec)
        prompt = form.place({"title": "Document 100000", "body": "", "query_text": ""})[0]
        (head,) = codec.encode([prompt], add_special_tokens=form.is_plain)
        self._num_form_tokens = len(head)

    def texts(self, count: int, num_tokens: int, seed: int) -> Iterator[str]:
        num_sentences = max(1, round((num_tokens - self._num_form_tokens / 2) / self._tokens_each))
        picks = np.random.default_rng(seed).integers(0, NUM_SENTENCES, (count, num_sentences))
        for row in picks.tolist():
            yield " ".join([self._sentences[i] for i in row])


def prepare(folder: Path, num_requests: int) -> None:
    """Write documents, queries, and the pairs to answer."""
    maker = TextMaker(TextCodec.load(find_model()))
    with connect(folder / "case.duckdb", create=True, memory_limit="1GB") as connection:
        create_schema(connection)

        def insert(table: str, batch: pa.Table) -> None:
            connection.register("batch", batch)
            connection.execute(f"insert into {table} by name from batch")
            connection.unregister("batch")

        num_documents = cdiv(num_requests, SHARE_DEGREE)
        for first in range(0, num_documents, BATCH_ROWS):
            numbers = range(first, min(first + BATCH_ROWS, num_documents))
            bodies = list(maker.texts(len(numbers), PREFIX_TOKENS, seed=first + 1))
            ids, titles = [f"d{n:07d}" for n in numbers], [f"Document {n}" for n in numbers]
            insert("documents", pa.table({"doc_id": ids, "title": titles, "body": bodies}))
        for first in range(0, num_requests, BATCH_ROWS):
            numbers = range(first, min(first + BATCH_ROWS, num_requests))
            texts = list(maker.texts(len(numbers), OWN_TOKENS, seed=-first + 2**31))
            insert("queries", pa.table({"query_id": [f"q{n:07d}" for n in numbers], "query_text": texts}))
            pairs = {"doc_id": [f"d{n % num_documents:07d}" for n in numbers]}
            insert("snippet_requests", pa.table(pairs | {"query_id": [f"q{n:07d}" for n in numbers]}))


def _make_source(folder: Path) -> Source:
    checkpoint = find_model()
    return Source(
        database=folder / "case.duckdb",
        model=str(checkpoint),
        checkpoint=checkpoint,
        model_digest="model",
        max_model_len=MAX_MODEL_LEN,
    )


def run_stage(stage: str, folder: Path) -> None:
    """One stage of the night of snippets in this process."""
    stages: dict[str, Callable[[], object]] = {
        "read": lambda: read.fn(_make_source(folder), load_workload("snippets"), folder),
        "tokenize": lambda: write_tokens(
            describe_parquet(folder / "requests.parquet"),
            folder / "tokens.parquet",
            load_workload("snippets"),
            find_model(),
            MAX_MODEL_LEN,
        ),
        "plan": lambda: write_plan(
            describe_parquet(folder / "tokens.parquet"),
            folder / "plan.parquet",
            "exact",
            PARTITION_TOKENS,
            ANSWER_TOKENS,
        ),
        "gather": lambda: gather(folder),
    }
    stages[stage]()


def gather(folder: Path) -> None:
    plan = describe_parquet(folder / "plan.parquet")
    summary = read_plan_summary(plan)
    num_rows = sum(read_partition(plan, partition).num_rows for partition in summary.dispatch_order)
    if num_rows != summary.num_rows:
        raise WrongAnswerError(f"partitions hold {num_rows} rows, the plan {summary.num_rows}")


def check(folder: Path, num_requests: int) -> dict[str, Any]:
    """The sizes of the results; raises `WrongAnswerError` if they are not what the data must give."""
    plan = describe_parquet(folder / "plan.parquet")
    summary = read_plan_summary(plan)
    if summary.num_rows != num_requests:
        raise WrongAnswerError(f"{summary.num_rows} rows planned, expected {num_requests}")
    sample = read_spread_rows(plan, 50)
    with pq.ParquetFile(folder / "tokens.parquet") as file:
        wanted = {int(row.row_id[0]): row.prompts[0] for row in sample}
        for batch in file.iter_batches(columns=["row_id", "token_ids"]):
            for position, row_id in enumerate(batch.column("row_id").to_pylist()):
                prompt = wanted.pop(row_id, None)
                if prompt is not None and prompt.tolist() != batch.column("token_ids")[position].as_py():
                    raise WrongAnswerError(f"row {row_id}: the partition's prompt is not the tokenized one")
    if wanted:
        raise WrongAnswerError(f"rows {sorted(wanted)} are in the plan only")
    num_documents = cdiv(num_requests, SHARE_DEGREE)
    sharing = summary.sharing
    num_saved = sharing.num_logical_tokens - sharing.num_processed_tokens
    expected = (num_requests - num_documents) * PREFIX_TOKENS
    if not 0.9 * expected <= num_saved <= 1.1 * expected:
        raise WrongAnswerError(f"{num_saved} tokens saved, expected about {expected}")
    costs = np.array(summary.partition_costs)
    return {
        "num_requests": num_requests,
        "num_prompt_tokens": sharing.num_logical_tokens,
        "token_saving_ratio": round(sharing.token_saving_ratio, 5),
        "best_token_saving_ratio": round(sharing.best_token_saving_ratio, 5),
        "num_groups": summary.num_groups,
        "num_partitions": summary.num_partitions,
        "largest_to_mean_partition_cost": round(float(costs.max() / costs.mean()), 4),
        "database_gb": round((folder / "case.duckdb").stat().st_size / 1e9, 3),
        **{
            f"{name}_gb": round((folder / f"{name}.parquet").stat().st_size / 1e9, 3)
            for name in ("requests", "tokens", "plan")
        },
    }
