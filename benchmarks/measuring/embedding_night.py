"""An embedding night, stage by stage, for ``python -m benchmarks.scale --night embeddings``.

Texts of mixed lengths (log-normal, 33 words of one token each in the median) in a real DuckDB file, and an encoder that
is as wide as a real one but shallow: embeddings of 384 numbers, and little to compute. The stages are the night's own:
read, tokenize, plan, infer (every partition, one after the other, as a worker does) and write.

Checked: every text has one embedding, and a sample of them equals what transformers gives for the text alone.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.measuring.wrong_answer import WrongAnswerError
from engine.config import EngineConfig
from engine.model.loading.checkpoint import checkpoint_digest
from tasks.database.connection import connect
from tasks.database.schema import create_schema
from tasks.partitions.attempt import infer_partition
from tasks.plan_prefix import write_plan
from tasks.read import read
from tasks.runs.infer_job import FailurePolicy, InferJob, JobMember
from tasks.runs.run import Run
from tasks.runs.source import Source
from tasks.storage.artifact import runs_folder
from tasks.storage.plan_file import read_plan_summary
from tasks.tokenize import read_max_model_len, write_tokens
from tasks.workloads.workload import Workload, load_workload
from tasks.write import write_run

STAGES = ("read", "tokenize", "plan", "infer", "write")
PARTITION_TOKENS, BATCH_ROWS, NUM_CHECKED = 500_000, 8192, 20
MAX_ERROR = 2e-5
WORKLOAD = """
name = "embeddings"
mode = "embed"
requests_sql = "select_documents.sql"
key = ["doc_id"]
normalize = true
[prompt]
template = "{body}"
[output]
table = "document_embeddings"
"""


def prepare(folder: Path, num_rows: int) -> None:
    """Write model, workload and database."""
    from benchmarks.embed import NUM_WORDS, make_checkpoint  # most stages' memory must not include torch

    make_checkpoint(folder / "model", "shallow")
    (folder / "embeddings.toml").write_text(WORKLOAD)
    (folder / "select_documents.sql").write_text("select doc_id, body from documents")
    words = np.array([f"w{number:05d}" for number in range(NUM_WORDS)])
    rng = np.random.default_rng(5)
    with connect(folder / "case.duckdb", create=True, memory_limit="1GB") as connection:
        create_schema(connection)
        for first in range(0, num_rows, BATCH_ROWS):
            count = min(BATCH_ROWS, num_rows - first)
            lengths = np.clip(rng.lognormal(3.5, 0.7, count).astype(int), 4, 510)
            bodies = [" ".join(words[rng.integers(0, NUM_WORDS, length)]) for length in lengths]
            ids = [f"d{number:07d}" for number in range(first, first + count)]
            connection.register("batch", pa.table({"doc_id": ids, "title": ids, "body": bodies}))
            connection.execute("insert into documents by name from batch")
            connection.unregister("batch")


def _load(folder: Path) -> Workload:
    return load_workload(folder / "embeddings.toml").bind(folder / "model")


def run_stage(stage: str, folder: Path) -> None:
    """Run one stage in this process; the run's folder holds the results of earlier ones."""
    workload, model, database = _load(folder), folder / "model", folder / "case.duckdb"
    if stage == "read":
        max_model_len = read_max_model_len(model, "auto")
        source = Source(
            database=database, model=str(model), checkpoint=model, model_digest="model", max_model_len=max_model_len
        )
        run = Run.begin(source, workload, {})
        run.note({"requests": read.fn(source, workload, run.folder).requests})
        return
    (record,) = runs_folder(database).glob("*/manifest.json")
    run = Run.load(database, record.parent)
    target = run.folder / f"{stage}.parquet"
    if stage == "tokenize":
        max_model_len = read_max_model_len(model, "auto")
        run.note({"tokens": write_tokens(run.artifacts["requests"], target, workload, model, max_model_len)})
    elif stage == "plan":
        run.note({"plan": write_plan(run.artifacts["tokens"], target, "none", PARTITION_TOKENS, 1)})
    elif stage == "infer":
        job = InferJob(
            members=(JobMember(run_folder=run.folder, workload=workload),),
            plan=run.artifacts["plan"],
            checkpoint=str(model),
            model_digest=checkpoint_digest(model),
            engine=EngineConfig(dtype="float32"),
            failures=FailurePolicy(retries=0),
        )
        for partition in read_plan_summary(job.plan).dispatch_order:
            infer_partition(partition, job)
    else:
        run.end("completed")
        write_run(run, workload)


def check(folder: Path, num_rows: int) -> dict[str, Any]:
    """The sizes of the results; raises `WrongAnswerError` if a row is missing, written twice or wrong."""
    with connect(folder / "case.duckdb") as connection:
        counts = connection.execute(
            "select count(*), count(distinct doc_id), count(*) filter (status = 'ok'), sum(num_prompt_tokens)"
            " from document_embeddings"
        ).fetchone()
        assert counts is not None
        if counts[:3] != (num_rows,) * 3:
            raise WrongAnswerError(f"rows, texts and answers are {counts[:3]}, expected {num_rows} each")
        rows = connection.execute(
            "select body, embedding from document_embeddings join documents using (doc_id)"
            f" order by hash(doc_id), doc_id limit {NUM_CHECKED}"
        ).fetchall()
    expected = embed_alone(folder / "model", [body for body, _ in rows])
    error = float(np.abs(np.array([embedding for _, embedding in rows], np.float32) - expected).max())
    if not error <= MAX_ERROR:
        raise WrongAnswerError(f"an embedding differs by {error:.1e}, {MAX_ERROR:.0e} is allowed")
    return {
        "num_requests": num_rows,
        "num_prompt_tokens": counts[3],
        "largest_error": error,
        "database_gb": round((folder / "case.duckdb").stat().st_size / 1e9, 3),
    }


def embed_alone(model_folder: Path, texts: Sequence[str]) -> np.ndarray:
    """Means of transformers' last hidden states, each text alone; ``[texts, hidden size]``, divided by its length."""
    import torch
    import transformers

    model: Callable[..., Any] = transformers.AutoModel.from_pretrained(model_folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    with torch.inference_mode():
        means = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state.mean(1)[0] for text in texts]
        return torch.nn.functional.normalize(torch.stack(means)).numpy()
