"""Typed answers compared with guided vLLM:  python -m benchmarks.guided [--model FOLDER] [--out FILE]

The prompts and the JSON schema of benchmarks/typed.py are answered greedily by vLLM, with prefix caching and each of
its backends for structured outputs, and by batchloom; each is a process of its own with the same weights, threads and
KV memory. Engines take turns in rounds, the first round is not counted, and every prompt is asked once. Invalid answers
are counted.

The cost of a row is compared, not of a token: batchloom computes forced tokens as a chunk of prefill, and engines may
write the same row with more or fewer tokens.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import duckdb

from benchmarks.measuring.engine_session import BLOCK_TOKENS, Session
from benchmarks.measuring.machine import describe_machine
from benchmarks.measuring.model_folder import find_model
from benchmarks.measuring.result_file import report
from benchmarks.measuring.turns import in_turn
from benchmarks.peers.catalog import PEERS, find_python
from benchmarks.peers.process import PeerError, PeerProcess
from benchmarks.peers.protocol import Work
from benchmarks.typed import MAX_NEW_TOKENS, SCHEMA, judge, make_prompts
from engine.kernels import cdiv
from tasks.prompts.text_codec import TextCodec

OURS = "batchloom"
BACKENDS = ("xgrammar", "guidance")
LOAD_SECONDS, RUN_SECONDS = 900.0, 900.0


def engines_of(backends: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By name: an engine's own settings. vLLM writes JSON without whitespace, which is the shortest."""
    return {OURS: {}} | {
        f"vllm, {backend}": {"structured_outputs_config": {"backend": backend, "disable_any_whitespace": True}}
        for backend in backends
    }


def measure(
    engines: Mapping[str, PeerProcess], codec: TextCodec, prompts: Sequence[Sequence[int]], rows: int, rounds: int
) -> dict[str, Any]:
    """Seconds, tokens and verdicts of each engine, in rounds.

    Args:
        engines: loaded, by name.
        codec: of the model.
        prompts: of all rounds.
        rows: of a round.
        rounds: that count.
    """
    found: dict[str, dict[str, Any]] = {name: {"seconds": [], "tokens": [], "verdicts": Counter()} for name in engines}
    with duckdb.connect() as connection:
        for number in range(rounds + 1):
            asked = [list(prompt) for prompt in prompts[number * rows : (number + 1) * rows]]
            work = Work(token_ids=asked, num_output_tokens=MAX_NEW_TOKENS, schema=json.dumps(SCHEMA))
            for name in in_turn(engines, number):
                answers, _ = engines[name].run(work, RUN_SECONDS)
                if number:
                    found[name]["seconds"].append(answers.seconds)
                    found[name]["tokens"].append(sum(map(len, answers.token_ids)))
                for token_ids in answers.token_ids:
                    problem = judge(codec.decode(token_ids), connection)
                    is_cut = problem and len(token_ids) >= MAX_NEW_TOKENS
                    found[name]["verdicts"]["not finished" if is_cut else problem or "valid"] += 1
    ours = found[OURS]["seconds"]
    for each in found.values():
        each["rows_per_second"] = round(rows / statistics.median(each["seconds"]), 3)
        each["batchloom_is_times_as_fast"] = round(
            statistics.median(theirs / own for theirs, own in zip(each["seconds"], ours, strict=True)), 3
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark with the options in `arguments` (the process's own if None)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guided", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="checkpoint folder or GGUF file; default: the demo's")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--rows", type=int, default=96, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-tokens", type=int, default=32768, help=f"a multiple of {BLOCK_TOKENS}")
    parser.add_argument("--threads", type=int, default=describe_machine()["num_cores"])
    parser.add_argument("--backends", nargs="*", choices=BACKENDS, default=BACKENDS, help="of vLLM")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    folder = find_model(options.model)
    machine = describe_machine()
    codec = TextCodec.load(folder)
    prompts = make_prompts(codec, options.rows * (options.rounds + 1))
    peers = {peer.name: peer for peer in PEERS}
    python = find_python(peers["vllm"], {})
    settings = engines_of(options.backends if python is not None else ())
    if python is None:
        print("vllm: not installed (make bench-peers)", file=sys.stderr)
    longest = max(map(len, prompts)) + MAX_NEW_TOKENS
    kv_tokens = cdiv(options.kv_tokens, BLOCK_TOKENS) * BLOCK_TOKENS
    try:
        with tempfile.TemporaryDirectory(prefix="batchloom-bench-") as logs, ExitStack() as stack:
            session = Session(
                model=folder.resolve(),
                device="cpu",
                num_threads=options.threads,
                max_num_batched_tokens=2048,
                options=settings,
                pythons={name: python for name in settings if name != OURS and python is not None},
                logs=Path(logs),
                run_seconds=RUN_SECONDS,
            )
            engines, versions = {}, {}
            for name in settings:
                engines[name] = stack.enter_context(session.start(name, peers[name.split(",")[0]].module))
                loaded, _, _ = engines[name].load(
                    session.settings(name, options.dtype, kv_tokens, longest), LOAD_SECONDS
                )
                versions[name] = loaded.versions
            found = measure(engines, codec, prompts, options.rows, options.rounds)
    except PeerError as error:
        print(f"benchmarks.guided: no figures: {error}", file=sys.stderr)
        return 1
    report(
        "guided", arguments, options.out, machine=machine, versions=versions, model=f"{folder.name}, {options.dtype}",
        engines=found,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
