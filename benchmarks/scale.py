"""A night larger than memory, stage by stage: ``python -m benchmarks.scale [--out FILE] [--sizes N ...]``.

The night is one of snippets, see benchmarks/measuring/snippet_night.py, or with ``--night embeddings`` one of
embeddings, see benchmarks/measuring/embedding_night.py. Each stage is a process of its own; its times and its peak
resident memory are recorded, including DuckDB's. A wrong answer ends the run with exit code 1 and no figures.

Goals: every stage of the largest size within 4 GB, and processor time per request that grows by less than half from the
smallest size (wall time includes what other programs take).
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.measuring.machine import describe_machine
from benchmarks.measuring.peak_memory import peak_resident_gb
from benchmarks.measuring.result_file import report
from benchmarks.measuring.wrong_answer import refuse_wrong_answers

NIGHTS = {
    "snippets": "benchmarks.measuring.snippet_night",
    "embeddings": "benchmarks.measuring.embedding_night",
}
"""Modules with STAGES and functions that prepare a night's database, run a stage and check the results. They are
imported when needed: a stage's memory must not include another night's imports."""


def measure_stage(run_stage: Callable[[str, Path], None], stage: str, folder: Path) -> dict[str, float]:
    """Run one stage in this process: wall and processor seconds, peak resident GB."""
    started, started_cpu = time.perf_counter(), time.process_time()
    run_stage(stage, folder)
    return {
        "wall_s": round(time.perf_counter() - started, 2),
        "cpu_s": round(time.process_time() - started_cpu, 2),
        "peak_resident_gb": round(peak_resident_gb(), 3),
    }


def measure_size(night: ModuleType, num_requests: int, scratch: Path | None) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="batchloom-scale-", dir=scratch) as name,
        ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes,
    ):
        folder = Path(name)
        night.prepare(folder, num_requests)
        stages = {}
        for stage in night.STAGES:
            stages[stage] = processes.submit(measure_stage, night.run_stage, stage, folder).result()
            print(f"{num_requests:,} requests, {stage}: {stages[stage]}", file=sys.stderr)
        return night.check(folder, num_requests) | {"stages": stages}


@refuse_wrong_answers
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="where the JSON goes, e.g. benchmarks/results/scale.json")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[62_500, 250_000, 1_000_000], help="requests, ascending"
    )
    parser.add_argument("--scratch", type=Path, help="folder for the files: about 15 GB for a million requests")
    parser.add_argument("--night", choices=[*NIGHTS], default="snippets")
    arguments = parser.parse_args()
    machine, night = describe_machine(), import_module(NIGHTS[arguments.night])
    sizes = [measure_size(night, size, arguments.scratch) for size in arguments.sizes]
    peak_gb = max(stage["peak_resident_gb"] for size in sizes for stage in size["stages"].values())
    growth = {
        stage: round(
            (sizes[-1]["stages"][stage]["cpu_s"] / sizes[-1]["num_requests"])
            / (sizes[0]["stages"][stage]["cpu_s"] / sizes[0]["num_requests"]),
            2,
        )
        for stage in night.STAGES
    }
    report(
        "scale", None, arguments.out, machine=machine,
        versions={name: version(name) for name in ("duckdb", "pyarrow", "tokenizers", "numpy")},
        night=arguments.night, sizes=sizes, cpu_time_per_request_last_to_first_size=growth,
        goals_met={
            f"{sizes[-1]['num_requests']:,} requests within 4 GB at every stage": peak_gb <= 4,
            "CPU time per request grows by less than half": max(growth.values()) < 1.5,
        },
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
