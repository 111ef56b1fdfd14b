"""Engines timed side by side on one batch, and what is reported of their runs."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.measuring.batch import Batch
from benchmarks.peers.process import PeerError, PeerProcess
from benchmarks.peers.protocol import Answers
from engine.simulation.model_shape import ModelShape

OURS = "batchloom"


@dataclass(slots=True)
class Timed:
    """Runs of one engine on one workload in one order."""

    seconds: list[float]
    answers: Answers
    peak_host_bytes: int = 0
    peak_device_bytes: int = 0


def measure_batch(
    engines: Mapping[str, PeerProcess],
    batch: Batch,
    order: str,
    *,
    num_unmeasured: int,
    num_repeats: int,
    run_seconds: float,
) -> dict[str, Timed | str]:
    """By engine: its runs, or why it has none. Every engine runs once in each round, the first ones unmeasured."""
    found: dict[str, Timed | str] = {}
    names = list(engines)
    for round_number in range(num_unmeasured + num_repeats):
        work = batch.work(order, round_number=round_number + 1)
        turn = round_number % max(1, len(names))
        for name in names[turn:] + names[:turn]:
            timed = found.get(name)
            if isinstance(timed, str):
                continue
            try:
                answers, memory = engines[name].run(work, run_seconds)
            except PeerError as error:
                found[name] = str(error)
                continue
            if round_number < num_unmeasured:
                found[name] = Timed(seconds=[], answers=answers)
            elif timed is not None:
                timed.seconds.append(answers.seconds)
                timed.answers = answers
                timed.peak_host_bytes = max(timed.peak_host_bytes, memory["host_bytes"])
                timed.peak_device_bytes = max(timed.peak_device_bytes, memory["device_bytes"])
    return found


def figures(timed: Timed, batch: Batch, shape: ModelShape, ceilings: Mapping[str, Any]) -> dict[str, Any]:
    """What is reported of one engine's runs. Shares are of the machine's own rate, attention not counted as work.

    A computed token counts as all layers' work; batchloom leaves most of the last one out on a CPU.
    """
    seconds = statistics.median(timed.seconds)
    num_output = batch.num_requests * batch.num_output_tokens
    num_decoded = num_output - batch.num_requests
    rate = ceilings["matrix_flops_per_second"]

    def share(num_rows: int) -> float:
        flops = 2 * (num_rows * shape.num_layer_weights + num_output * shape.num_head_weights)
        return round(flops / seconds / rate, 4)

    answers = timed.answers
    result = {
        "seconds": [round(value, 4) for value in timed.seconds],
        "median_seconds": round(seconds, 4),
        "spread": round((max(timed.seconds) - min(timed.seconds)) / seconds, 4),
        "requests_per_second": round(batch.num_requests / seconds, 3),
        "output_tokens_per_second": 0.0 if batch.labels else round(num_output / seconds, 2),
        "total_tokens_per_second": round((batch.num_prompt_tokens + num_output) / seconds, 1),
        "num_computed_tokens": answers.num_computed_tokens,
        "share_of_ceiling": None if answers.num_computed_tokens is None else share(answers.num_computed_tokens),
        "share_of_ceiling_for_the_least_work": share(batch.num_distinct_tokens + num_decoded),
        "peak_host_bytes": timed.peak_host_bytes,
        "peak_device_bytes": timed.peak_device_bytes,
        "details": answers.details,
    }
    if "num_steps" in answers.details:
        num_bytes = answers.details["num_steps"] * shape.weight_bytes
        result["share_of_bandwidth_for_weights"] = round(num_bytes / seconds / ceilings["copy_bytes_per_second"], 4)
    return result


def speedups(found: Mapping[str, Timed | str]) -> dict[str, dict[str, float]]:
    """batchloom over each other engine: the ratio of medians, and the least and the most of any round."""
    ours = found.get(OURS)
    if not isinstance(ours, Timed):
        return {}
    ratios = {}
    for name, timed in found.items():
        if name != OURS and isinstance(timed, Timed):
            rounds = [theirs / own for theirs, own in zip(timed.seconds, ours.seconds, strict=True)]
            median = statistics.median(timed.seconds) / statistics.median(ours.seconds)
            ratios[name] = {"median": round(median, 3), "least": round(min(rounds), 3), "most": round(max(rounds), 3)}
    return ratios
