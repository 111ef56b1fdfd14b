"""The papers' tables, reproduced in ratio:  python -m benchmarks.papers [--model M] [--only NAME ...] [--out FILE]

Each row of a table runs one configuration of this engine: measured with a small model on the processor, or simulated
(the real planner and scheduler, steps timed by a roofline of the device that is named). Measured configurations must
first give the same greedy answers in float32, or the table gets no figures; the others are run all the same, and the
exit code is 1.

Results are kept by table, each as soon as it is there: those that are not run stay as they are in the file. `--render`
runs nothing and writes what the file holds into docs/papers.md, with the plots beside it.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.measuring.machine import describe_machine
from benchmarks.measuring.model_folder import find_model
from benchmarks.measuring.result_file import write_result
from benchmarks.measuring.wrong_answer import WrongAnswerError
from benchmarks.papers.disaggregation import disaggregation
from benchmarks.papers.lab import Lab
from benchmarks.papers.notes import measured_notes, simulated_notes
from benchmarks.papers.page import render_page
from benchmarks.papers.prepacking import prepacking
from benchmarks.papers.relay import relay
from benchmarks.papers.saving import saving
from benchmarks.papers.table import Table
from benchmarks.papers.throughput import measured_throughput, simulated_throughput
from benchmarks.papers.token_batching import token_batching
from benchmarks.random_model import write_checkpoint
from engine.errors import BatchloomError

ROOT = Path(__file__).parents[2]
RANDOM_SHAPE: Mapping[str, Any] = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4096, "max_position_embeddings": 4096,
    "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip

SIMULATED: Mapping[str, Callable[[], Table]] = {
    "saving": saving,
    "token-batching": token_batching,
    "throughput-simulated": simulated_throughput,
    "notes-simulated": simulated_notes,
    "disaggregation": disaggregation,
}
MEASURED: Mapping[str, Callable[[Lab], Table]] = {
    "throughput-measured": measured_throughput,
    "prepacking": prepacking,
    "relay": lambda lab: relay(lab.num_threads),
    "notes-measured": measured_notes,
}


@contextmanager
def open_lab(arguments: argparse.Namespace) -> Iterator[Lab]:
    """The model that was given, or a small one of random weights."""
    with tempfile.TemporaryDirectory(prefix="batchloom-papers-") as folder:
        if arguments.model:
            model = find_model(arguments.model)
            name = Path(arguments.model).stem
        else:
            model = Path(folder) / "model"
            write_checkpoint(model, dict(RANDOM_SHAPE))
            name = "a Llama of random weights, {num_hidden_layers} layers of {hidden_size}".format(**RANDOM_SHAPE)
        yield Lab(model, name=name, dtype=arguments.dtype, num_threads=arguments.threads)


def main(command_line: Sequence[str] | None = None) -> int:
    names = [*SIMULATED, *MEASURED]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder or GGUF file; else a small model of random weights")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of what is timed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "papers.json")
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "papers.md")
    parser.add_argument("--render", action="store_true", help="run nothing; write the document from the results")
    arguments = parser.parse_args(command_line)
    results = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"benchmark": "papers", "tables": {}}
    if arguments.render:
        render_page(results, arguments.document)
        return 0
    failed = []
    with open_lab(arguments) as lab:
        for name in arguments.only:
            machine, started = describe_machine(), time.perf_counter()
            print(f"{name}: begun", flush=True)
            try:
                table = SIMULATED[name]() if name in SIMULATED else MEASURED[name](lab)
            except (WrongAnswerError, BatchloomError) as error:
                print(f"benchmarks.papers: {name}: no figures: {error}", file=sys.stderr, flush=True)
                failed.append(name)
                continue
            results["tables"][name] = {
                "command": _command(arguments, name),
                "machine": machine,
                "versions": {package: version(package) for package in ("torch", "transformers", "numpy")},
                "table": asdict(table),
            }
            write_result(arguments.out, results)
            print(f"{name}: {len(table.rows)} rows after {time.perf_counter() - started:.0f} s", flush=True)
    return 1 if failed else 0


def _command(arguments: argparse.Namespace, name: str) -> str:
    if name in SIMULATED:
        return f"python -m benchmarks.papers --only {name}"
    model = f"--model {Path(arguments.model).name} " if arguments.model else ""
    return f"python -m benchmarks.papers {model}--only {name} --dtype {arguments.dtype} --threads {arguments.threads}"


if __name__ == "__main__":
    sys.exit(main())
