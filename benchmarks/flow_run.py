"""A whole nightly run from table to table, with its time by stage:
    python -m benchmarks.flow_run --model FOLDER --squad FILE [--questions N] [--out FILE]

The nightly flow answers a database of a SQuAD-format file's paragraphs and questions, with rows in random order. It
runs in a process of its own, with everything that a user's run has: Prefect and its temporary server, DuckDB,
tokenizing, planning, writing. A night of one row runs before, since the first night on a machine creates Prefect's
tables and compiles the kernels; its seconds are reported separately. Times by stage are from the run's record; the
model's time is the sum of its steps; overhead is the rest, including the start of the process. If an answer is missing,
no figures are given.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from benchmarks.measuring.machine import describe_machine
from benchmarks.measuring.model_folder import find_model, read_model_shape
from benchmarks.measuring.result_file import report
from tasks.database.connection import connect
from tasks.database.schema import create_schema

STAGES = ("read", "tokenize", "plan", "infer", "write")


def build_database(file: Path, squad: Path, num_questions: int) -> int:
    """Write documents, queries and requests; returns the number of requests."""
    documents, queries, asked = [], [], []
    for article in json.loads(squad.read_text())["data"]:
        for number, paragraph in enumerate(article["paragraphs"]):
            doc_id = f"{article['title']}-{number}"
            documents.append({"doc_id": doc_id, "title": article["title"], "body": paragraph["context"]})
            for qa in paragraph["qas"]:
                queries.append({"query_id": qa["id"], "query_text": qa["question"]})
                asked.append({"doc_id": doc_id, "query_id": qa["id"]})
    # Take the first documents' questions, so that sharing is as in the whole file, and shuffle the rows.
    asked = asked[:num_questions]
    asked = [asked[index] for index in np.random.default_rng(3).permutation(len(asked))]
    with connect(file, create=True) as connection:
        create_schema(connection)
        for table, rows in (("documents", documents), ("queries", queries), ("snippet_requests", asked)):
            connection.from_arrow(pa.Table.from_pylist(rows)).insert_into(table)
    return len(asked)


def run_flow(database: Path, model: Path, options: Sequence[str]) -> tuple[float, int]:
    """Runs the flow; returns seconds and the peak resident bytes of its largest process.

    Raises:
        RuntimeError: the flow failed; its output is in the message.
    """
    command = [sys.executable, "-m", "flows.nightly", "--database", database, "--model", model]
    environment = os.environ | {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
    environment["PREFECT_HOME"] = str(database.parent / "prefect")
    started = time.perf_counter()
    done = subprocess.run(
        [*command, "--workload", "snippets", *options],
        cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    seconds = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(
            f"the flow ended with exit code {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def read_run(connection: duckdb.DuckDBPyConnection) -> tuple[dict[str, Any], float]:
    """The row of the only run, and the seconds of its steps."""
    runs = connection.table("runs").to_arrow_table().to_pylist()
    durations = connection.table("steps").to_arrow_table().column("duration_ms").to_pylist()
    return runs[0], sum(durations) / 1e3


def measure(
    model: Path, squad: Path, num_questions: int, dtype: str, kv_bytes: int, flow_options: Sequence[str]
) -> dict[str, Any]:
    """The figures of one run. Raises `RuntimeError` if a row has no answer."""
    options = ["--dtype", dtype, "--kv-memory", str(kv_bytes), *flow_options]
    with tempfile.TemporaryDirectory(prefix="batchloom-flow-") as folder:
        first, database = Path(folder) / "first.duckdb", Path(folder) / "night.duckdb"
        build_database(first, squad, 1)
        first_seconds, _ = run_flow(first, model, options)
        num_rows = build_database(database, squad, num_questions)
        seconds, peak_bytes = run_flow(database, model, options)
        with connect(database, read_only=True) as connection:
            run, model_seconds = read_run(connection)
    if run["num_ok"] != num_rows or run["status"] != "completed":
        raise RuntimeError(f"{run['num_ok']} of {num_rows} rows are answered: {run['error']}")
    stages = {stage: round(run[f"{stage}_seconds"], 3) for stage in STAGES}
    limit_bytes = kv_bytes + read_model_shape(model, dtype).weight_bytes + 1024**3
    return {
        "num_rows": num_rows,
        "num_prompt_tokens": run["num_prompt_tokens"],
        "num_computed_tokens": run["num_computed_tokens"],
        "num_output_tokens": run["num_output_tokens"],
        "first_night_seconds": round(first_seconds, 2),
        "seconds": round(seconds, 2),
        "stage_seconds": stages | {"start and end": round(seconds - sum(stages.values()), 3)},
        "model_seconds": round(model_seconds, 2),
        "overhead_share": round(1 - model_seconds / seconds, 4),
        "peak_host_bytes": peak_bytes,
        "memory_limit_bytes": limit_bytes,
    }


def main(command_line: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint folder or GGUF file")
    parser.add_argument("--squad", type=Path, required=True, help="file in SQuAD's form")
    parser.add_argument("--questions", type=int, default=10**9, help="how many of the file's, from its beginning")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--kv-mib", type=int, default=512, help="KV memory")
    parser.add_argument("--out", type=Path, help="where the JSON goes, e.g. benchmarks/results/flow_run.json")
    arguments, flow_options = parser.parse_known_args(command_line)
    model = find_model(arguments.model)
    machine = describe_machine()
    try:
        run = measure(
            model, arguments.squad, arguments.questions, arguments.dtype, arguments.kv_mib * 2**20, flow_options
        )
    except RuntimeError as error:
        print(f"benchmarks.flow_run: no figures: {error}", file=sys.stderr)
        return 1
    report("flow_run", command_line, arguments.out, machine=machine, model=f"{model.name}, {arguments.dtype}", run=run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
