"""Compares engines: whether their answers are right, and how fast they are."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import product
from typing import Any

from benchmarks.measuring.batch import Batch
from benchmarks.measuring.correctness import Referee, Verdict
from benchmarks.measuring.engine_session import BLOCK_TOKENS, Session
from benchmarks.measuring.model_folder import read_model_shape
from benchmarks.measuring.timed_runs import Ceilings, Timed, figures, measure_batch, speedups
from benchmarks.peers.catalog import Peer
from benchmarks.peers.process import PeerError, PeerProcess
from benchmarks.peers.protocol import Loaded
from engine.kernels import cdiv
from engine.model.model_shape import ModelShape

LOAD_SECONDS = 900.0
GATE_GROUPS, GATE_MEMBERS = 3, 2
ROOM_BYTES = 1024**3
"""Memory that an engine may take besides weights and KV."""


def check_answers(session: Session, peers: Sequence[Peer], batches: Sequence[Batch]) -> dict[str, Verdict]:
    """By engine, the verdict on its float32 answers to a small part of each workload, in too little KV memory."""
    parts = [batch.first(GATE_GROUPS, GATE_MEMBERS) for batch in batches]
    longest = max(part.longest_request for part in parts)
    kv_tokens = cdiv(3 * longest, 2 * BLOCK_TOKENS) * BLOCK_TOKENS
    verdicts = {peer.name: Verdict() for peer in peers}
    given = []
    for peer in peers:  # one engine in memory at a time, then the referee
        try:
            with session.start(peer.name, peer.module, peer.arguments) as engine:
                engine.load(session.settings(peer.name, "float32", kv_tokens, longest), LOAD_SECONDS)
                for number, part in enumerate(parts):
                    work = part.work("shuffled", round_number=number)
                    answers, _ = engine.run(work, session.run_seconds)
                    given.append((peer.name, part, work.token_ids, answers))
        except PeerError as error:
            verdicts[peer.name].failure = str(error)
    with session.start("referee", "benchmarks.peers.judge_engine") as process:
        process.load(session.settings("referee", "float32", kv_tokens, longest), LOAD_SECONDS)
        referee = Referee(process, session.run_seconds)
        for name, part, prompts, answers in given:
            referee.judge(part, prompts, answers, verdicts[name])
    for name, verdict in verdicts.items():
        print(f"{name:24} float32: {verdict.text}", flush=True)
    return verdicts


def measure(
    session: Session, peers: Sequence[Peer], batches: Sequence[Batch], arguments: argparse.Namespace
) -> Iterator[tuple[str, Any]]:
    """Yield parts of the report: "engines", "ceilings", "workloads", each complete so far.

    Then "measured": the workload's index, and the engines that were just measured on it.

    Args:
        session: how engines are started.
        peers: in the order in which they are loaded.
        batches: the workloads.
        arguments: of the command line.
    Raises:
        PeerError: nothing was timed, since every engine failed.
    """
    longest = max(batch.longest_request for batch in batches)
    shape = read_model_shape(session.model, arguments.dtype)
    memory_limit = arguments.kv_tokens * shape.kv_bytes_per_token + shape.weight_bytes + ROOM_BYTES
    num_rounds = session.num_unmeasured + arguments.repeats
    cases = list(product(batches, arguments.orders))
    timed: list[dict[str, Timed | str]] = [{} for _ in cases]
    loads: dict[str, Any] = {}
    with session.start("ceilings", "benchmarks.peers.ceilings_engine") as process:
        process.load(session.settings("ceilings", arguments.dtype, BLOCK_TOKENS, longest), LOAD_SECONDS)
        ceilings = Ceilings(**process.call("measure", {}, LOAD_SECONDS)["answer"])

        def measure_ceilings() -> None:
            nonlocal ceilings
            ceilings = ceilings.best_of(Ceilings(**process.call("measure", {}, LOAD_SECONDS)["answer"]))

        for team in [[peer] for peer in peers] if arguments.in_turn else [list(peers)]:
            with ExitStack() as stack:
                engines = _load_engines(stack, session, team, arguments, longest, loads)
                yield "engines", loads
                if not engines:
                    continue
                for index, (batch, order) in enumerate(cases):
                    ended = [peer for peer in team if peer.name in engines and engines[peer.name].has_ended]
                    engines |= _load_engines(stack, session, ended, arguments, longest, loads)
                    found = measure_batch(
                        engines, batch, order, num_unmeasured=session.num_unmeasured, num_repeats=arguments.repeats,
                        run_seconds=session.run_seconds, first_round=1 + index * num_rounds,
                        before_round=measure_ceilings,
                    )  # fmt: skip
                    timed[index].update(found)
                    yield "ceilings", asdict(ceilings)
                    workloads = [
                        _workload(*case, arguments.kv_tokens, memory_limit)
                        | _engine_figures(runs, case[0], shape, ceilings)
                        for case, runs in zip(cases, timed, strict=True)
                        if runs
                    ]
                    yield "workloads", workloads
                    yield "measured", (index, list(found))
    all_runs = [runs for found in timed for runs in found.values()]
    if not any(isinstance(runs, Timed) for runs in all_runs):
        failures = [load["failure"] for load in loads.values() if "failure" in load]
        raise PeerError(f"no figures: {'; '.join(dict.fromkeys([*failures, *map(str, all_runs)]))}")


def _load_engines(
    stack: ExitStack,
    session: Session,
    peers: Sequence[Peer],
    arguments: argparse.Namespace,
    longest: int,
    loads: dict[str, Any],
) -> dict[str, PeerProcess]:
    """The engines that could be loaded, by name.

    Args:
        stack: ends their processes.
        session: how they are started.
        peers: to be loaded.
        arguments: of the command line.
        longest: tokens of the longest request.
        loads: filled with what each engine reported of its loading, or why it failed.
    """
    engines = {}
    for peer in peers:
        engine = stack.enter_context(session.start(peer.name, peer.module, peer.arguments))
        settings = session.settings(peer.name, arguments.dtype, arguments.kv_tokens, longest)
        try:
            loads[peer.name] = _described(*engine.load(settings, LOAD_SECONDS))
            engines[peer.name] = engine
        except PeerError as error:
            loads[peer.name] = {"failure": str(error)}
        print(f"{peer.name:24} loaded: {json.dumps(loads[peer.name])}", flush=True)
    return engines


def _engine_figures(
    timed: Mapping[str, Timed | str], batch: Batch, shape: ModelShape, ceilings: Ceilings
) -> dict[str, Any]:
    return {
        "engines": {
            name: figures(runs, batch, shape, ceilings) if isinstance(runs, Timed) else {"failure": runs}
            for name, runs in timed.items()
        },
        "batchloom_over": speedups(timed),
    }


def _described(loaded: Loaded, seconds: float, memory: Mapping[str, int]) -> dict[str, Any]:
    return asdict(loaded) | {"load_seconds": round(seconds, 2), "load_peak_host_bytes": memory["host_bytes"]}


def _workload(batch: Batch, order: str, kv_tokens: int, memory_limit_bytes: int) -> dict[str, Any]:
    return {
        "name": batch.name,
        "order": order,
        "shape": batch.shape,
        "num_requests": batch.num_requests,
        "num_prompt_tokens": batch.num_prompt_tokens,
        "num_distinct_tokens": batch.num_distinct_tokens,
        "num_output_tokens": 0 if batch.labels else batch.num_requests * batch.num_output_tokens,
        "do_prefixes_fit_in_kv": batch.num_prefix_tokens <= kv_tokens,
        "memory_limit_bytes": memory_limit_bytes,
    }
