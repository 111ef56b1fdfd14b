"""Times engines side by side on one batch, and computes the figures of their runs."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.measuring.batch import Batch
from benchmarks.measuring.turns import in_turn
from benchmarks.peers.process import PeerError, PeerProcess
from benchmarks.peers.protocol import Answers
from engine.model.model_shape import ModelShape

OURS = "batchloom"


@dataclass(slots=True)
class Timed:
    """Runs of one engine on one workload in one order."""

    seconds: list[float]
    answers: Answers
    peak_host_bytes: int = 0
    peak_device_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The rates that the machine itself reached: the best of all rounds, as upper bounds for engines.

    Attributes:
        device: the GPU's name, or "CPU".
        by_product: operations per second of each kind of matrix product.
    """

    device: str
    matrix_flops_per_second: float
    copy_bytes_per_second: float
    by_product: dict[str, float]

    def best_of(self, other: "Ceilings") -> "Ceilings":
        """The higher of each rate."""
        return Ceilings(
            device=self.device,
            matrix_flops_per_second=max(self.matrix_flops_per_second, other.matrix_flops_per_second),
            copy_bytes_per_second=max(self.copy_bytes_per_second, other.copy_bytes_per_second),
            by_product=self.by_product
            | {name: max(rate, self.by_product.get(name, 0.0)) for name, rate in other.by_product.items()},
        )


def measure_batch(
    engines: Mapping[str, PeerProcess],
    batch: Batch,
    order: str,
    *,
    num_unmeasured: int,
    num_repeats: int,
    run_seconds: float,
    first_round: int = 1,
    before_round: Callable[[], object] = lambda: None,
) -> dict[str, Timed | str]:
    """Times every engine once in each round.

    Args:
        num_unmeasured: warm-up rounds.
        first_round: number of the first round. Prompts of two rounds share nothing if their numbers differ: an engine
            that keeps KV from call to call would be served by what it computed before.
        before_round: called before each measured round; measures the machine.

    Returns:
        by engine, its runs, or why it has none.
    """
    found: dict[str, Timed | str] = {}
    for round_number in range(num_unmeasured + num_repeats):
        work = batch.work(order, round_number=first_round + round_number)
        if round_number >= num_unmeasured:
            before_round()
        for name in in_turn(engines, round_number):
            if isinstance(found.get(name), str):
                continue
            try:
                answers, memory = engines[name].run(work, run_seconds)
            except PeerError as error:
                found[name] = str(error)
                continue
            timed = found.setdefault(name, Timed(seconds=[], answers=answers))
            if isinstance(timed, Timed) and round_number >= num_unmeasured:
                timed.seconds.append(answers.seconds)
                timed.answers = answers
                timed.peak_host_bytes = max(timed.peak_host_bytes, memory["host_bytes"])
                timed.peak_device_bytes = max(timed.peak_device_bytes, memory["device_bytes"])
    return found


def figures(timed: Timed, batch: Batch, shape: ModelShape, ceilings: Ceilings) -> dict[str, Any]:
    """The figures of one engine's runs. Shares are of the machine's own rate; attention is not counted as work.

    A computed token counts as the work of all layers, though batchloom skips most of the last one on a CPU. A share
    above 1 is None, with the reason under "not_measured": then the measured ceiling is too low.
    """
    seconds = statistics.median(timed.seconds)
    num_output = batch.num_requests * batch.num_output_tokens
    num_decoded = num_output - batch.num_requests
    answers = timed.answers
    not_measured: dict[str, str] = {}

    def share(name: str, amount: float, rate: float) -> float | None:
        found = round(amount / seconds / rate, 4)
        if found <= 1:
            return found
        not_measured[name] = f"not measured: {found:.0%}; torch's products were slower, or the machine was busy"
        return None

    def share_of_rate(name: str, num_rows: int | None) -> float | None:
        if num_rows is None:
            not_measured[name] = "not measured: the engine does not say how many tokens it computed"
            return None
        flops = 2 * (num_rows * shape.num_layer_weights + num_output * shape.num_head_weights)
        return share(name, flops, ceilings.matrix_flops_per_second)

    result = {
        "seconds": [round(value, 4) for value in timed.seconds],
        "median_seconds": round(seconds, 4),
        "spread": round((max(timed.seconds) - min(timed.seconds)) / seconds, 4),
        "requests_per_second": round(batch.num_requests / seconds, 3),
        "output_tokens_per_second": 0.0 if batch.labels else round(num_output / seconds, 2),
        "total_tokens_per_second": round((batch.num_prompt_tokens + num_output) / seconds, 1),
        "num_computed_tokens": answers.num_computed_tokens,
        "share_of_ceiling": share_of_rate("share_of_ceiling", answers.num_computed_tokens),
        "share_of_ceiling_for_the_least_work": share_of_rate(
            "share_of_ceiling_for_the_least_work", batch.num_distinct_tokens + num_decoded
        ),
        "peak_host_bytes": timed.peak_host_bytes,
        "peak_device_bytes": timed.peak_device_bytes,
        "details": answers.details,
    }
    if "num_steps" in answers.details:
        num_bytes = answers.details["num_steps"] * shape.weight_bytes
        name = "share_of_bandwidth_for_weights"
        result[name] = share(name, num_bytes, ceilings.copy_bytes_per_second)
    return result | {"not_measured": not_measured}


def speedups(found: Mapping[str, Timed | str]) -> dict[str, dict[str, float]]:
    """batchloom's speed over each other engine's in the same round: median, least and most of all rounds."""
    ours = found.get(OURS)
    if not isinstance(ours, Timed):
        return {}
    ratios = {}
    for name, timed in found.items():
        if name != OURS and isinstance(timed, Timed):
            rounds = [theirs / own for theirs, own in zip(timed.seconds, ours.seconds, strict=True)]
            figures = {"median": statistics.median(rounds), "least": min(rounds), "most": max(rounds)}
            ratios[name] = {figure: round(ratio, 3) for figure, ratio in figures.items()}
    return ratios
