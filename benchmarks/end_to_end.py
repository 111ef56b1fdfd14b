"""Whole batches, batchloom compared with other engines:  python -m benchmarks.end_to_end --model FOLDER [--out FILE]

Engines: batchloom, vLLM, OpenVINO GenAI, llama.cpp, transformers (continuous batching; padded generate), each in its
own process, with the same weights, prompts, numbers of new tokens, threads and KV memory. `make bench-peers` installs
them; missing engines, and on a GPU those that run only on a CPU, are skipped by name. Workloads:
benchmarks/measuring/workloads.py; rows are shuffled, as in a table, or grouped by document.

First, each engine answers a small part of each workload in float32. An engine whose answers are not those of a
transformers model (teacher forced, except near ties) is named and not timed; if it is batchloom, the program ends.
Then, in --dtype, every engine is loaded and warmed up with the workload, on a GPU twice. It is timed in rounds, each
with another order of the engines; processes that do not run are stopped. With --in-turn, one engine is in memory at a
time and does all its rounds, for models that do not fit in memory several times. Prompts of two rounds share no prefix.
Each round also measures the machine's rates of matrix products and copies. No figure includes loading or compiling.

The defaults are sizes for a CPU. A GPU needs larger ones: docs/first_light.md has its command.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.measuring.comparison import check_answers, measure
from benchmarks.measuring.engine_session import BLOCK_TOKENS, Session
from benchmarks.measuring.machine import describe_command, describe_machine
from benchmarks.measuring.model_folder import find_model, read_model_shape
from benchmarks.measuring.result_file import write_result
from benchmarks.measuring.timed_runs import OURS
from benchmarks.measuring.workloads import Sizes, make_batches, workload_names
from benchmarks.peers.catalog import PEERS, available
from benchmarks.peers.process import PeerError
from engine.errors import BatchloomError


def print_workload(workload: Mapping[str, Any], names: Collection[str]) -> None:
    """One line per named engine."""
    print(f"\n{workload['name']}, {workload['order']}: {workload['shape']}", flush=True)
    for name in names:
        row = workload["engines"][name]
        if "failure" in row:
            print(f"  {name:24} {row['failure']}", flush=True)
            continue
        ratio = workload["batchloom_over"].get(name, {}).get("median")
        share, computed = row["share_of_ceiling"], row["num_computed_tokens"]
        print(
            f"  {name:24} {row['median_seconds']:8.2f} s ±{row['spread']:4.0%} {row['requests_per_second']:8.2f} req/s "
            f"{row['output_tokens_per_second']:8.1f} out/s {row['total_tokens_per_second']:9.0f} tok/s  computed "
            f"{'?' if computed is None else computed:>7}  ceiling {'   ?' if share is None else f'{share:4.0%}'}  peak "
            f"{row['peak_host_bytes'] / 2**30:.2f} GiB{'' if ratio is None else f'  batchloom is {ratio:.2f}x'}",
            flush=True,
        )
        for figure, reason in row["not_measured"].items():
            if computed is not None:
                print(f"    {figure}: {reason}", flush=True)


def report(arguments: argparse.Namespace) -> None:
    """Check answers, then measure; prints and writes figures. Raises `SystemExit` if batchloom's answers are wrong."""
    model = find_model(arguments.model)
    shape = read_model_shape(model, arguments.dtype)
    sizes = Sizes(
        scale=arguments.scale,
        num_tokens=arguments.tokens,
        kv_tokens=arguments.kv_tokens,
        vocab_size=shape.vocab_size,
    )
    batches = list(
        make_batches(
            arguments.workloads, sizes, tokenizer=model / "tokenizer.json", squad=arguments.squad,
            ranking=arguments.ranking,
        )
    )  # fmt: skip
    chosen = [peer for peer in PEERS if peer.name in arguments.engines]
    pythons, skipped = available(chosen, arguments.pythons, arguments.device, arguments.dtype)
    not_asked = {name: "its file is not named" for name in arguments.workloads if name not in {b.name for b in batches}}
    for name, reason in (skipped | not_asked).items():
        print(f"{name:24} skipped: {reason}", flush=True)
    found: dict[str, Any] = {
        "benchmark": "end_to_end",
        "command": arguments.command,
        "machine": describe_machine(),
        "model": f"{model.name}, {arguments.dtype}",
        "settings": {
            name: getattr(arguments, name)
            for name in (
                "scale",
                "tokens",
                "kv_tokens",
                "max_num_batched_tokens",
                "threads",
                "repeats",
                "in_turn",
                "run_seconds",
                "device",
                "options",
            )
        },
        "skipped": skipped | not_asked,
    }
    with tempfile.TemporaryDirectory(prefix="batchloom-bench-") as folder:
        session = Session(
            model=model.resolve(),
            device=arguments.device,
            num_threads=arguments.threads,
            max_num_batched_tokens=arguments.max_num_batched_tokens,
            options=arguments.options,
            pythons=pythons,
            logs=arguments.logs or Path(folder),
            run_seconds=arguments.run_seconds,
        )
        present = [peer for peer in chosen if peer.name in pythons]
        verdicts = check_answers(session, present, batches)
        found["correctness"] = {
            name: asdict(verdict) | {"is_right": verdict.is_right} for name, verdict in verdicts.items()
        }
        if OURS in verdicts and not verdicts[OURS].is_right:
            raise SystemExit(f"benchmarks.end_to_end: no figures: {OURS}: {verdicts[OURS].text}")
        right = [peer for peer in present if verdicts[peer.name].is_right]
        if not right:
            raise PeerError("no figures: no engine that is installed gives right answers")
        for part, value in measure(session, right, batches, arguments):
            if part == "measured":
                index, names = value
                print_workload(found["workloads"][index], names)
                continue
            found[part] = value
            if part == "workloads" and arguments.out is not None:  # keep it, even if the next part fails
                write_result(arguments.out, found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [peer.name for peer in PEERS]
    parser.add_argument("--model", required=True, help="checkpoint folder, or GGUF file, which is converted once")
    parser.add_argument("--engines", nargs="+", choices=names, default=names, metavar="ENGINE", help=", ".join(names))
    parser.add_argument(
        "--workloads", nargs="+", choices=workload_names(), metavar="WORKLOAD",
        default=["case-1", "case-2", "squad", "ranking", "control"], help=", ".join(workload_names()),
    )  # fmt: skip
    parser.add_argument("--orders", nargs="+", choices=["shuffled", "grouped"], default=["shuffled"])
    parser.add_argument("--squad", type=Path, help="file in SQuAD's form")
    parser.add_argument("--ranking", type=Path, help="folder with queries.tsv, corpus.tsv, qrels.txt")
    parser.add_argument("--scale", type=float, default=0.25, help="factor of the paper's lengths")
    parser.add_argument("--tokens", type=int, default=20_000, help="about so many distinct prompt tokens in a workload")
    parser.add_argument("--kv-tokens", type=int, default=4096, help="KV memory of every engine; a multiple of 128")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, help="most tokens in one step of the model")
    parser.add_argument(
        "--in-turn", action="store_true",
        help="one engine in memory at a time, all rounds of one before the next one's",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32", "int8"], default="bfloat16", help="timed number format"
    )
    parser.add_argument("--device", default="cpu", help="cpu, or cuda for engines that run there")
    parser.add_argument("--threads", type=int, default=describe_machine()["num_cores"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--run-seconds", type=float, default=600.0, help="longest run of one engine on one workload")
    parser.add_argument(
        "--options", type=json.loads, default={}, metavar="JSON",
        help='engines\' own settings, such as {"batchloom": {"max_num_batched_tokens": 2048}}',
    )  # fmt: skip
    parser.add_argument(
        "--python", dest="pythons", type=_named_path, action="append", default=[], metavar="ENGINE=PATH",
        help="the interpreter of an engine that is not in .peers",
    )  # fmt: skip
    parser.add_argument("--logs", type=Path, help="folder for the engines' output; made if it does not exist")
    parser.add_argument("--out", type=Path, help="JSON result file, e.g. benchmarks/results/end_to_end/zen4/NAME.json")
    return parser


def _named_path(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not equals or name not in {peer.name for peer in PEERS}:
        raise argparse.ArgumentTypeError(f"expected ENGINE=PATH, got {text!r}")
    return name, Path(path)


def main(command_line: Sequence[str] | None = None) -> int:
    """Measures as `command_line` says (the process's own if None); returns the exit code."""
    parser = _parser()
    arguments = parser.parse_args(command_line)
    arguments.pythons = dict(arguments.pythons)
    arguments.command = describe_command(
        "benchmarks.end_to_end", sys.argv[1:] if command_line is None else command_line
    )
    if arguments.kv_tokens % BLOCK_TOKENS or arguments.kv_tokens < 1:
        parser.error(f"--kv-tokens must be a multiple of {BLOCK_TOKENS}, got {arguments.kv_tokens}")
    if arguments.logs is not None:
        try:
            arguments.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--logs {arguments.logs}: {error.strerror}")
    try:
        report(arguments)
    except (BatchloomError, PeerError) as error:
        print(f"benchmarks.end_to_end: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
