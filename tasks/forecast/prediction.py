"""Predicts a run by simulating every partition of its plan, or a few that stand for the others."""

import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from engine.simulation.simulation import SimulationSummary
from tasks.forecast.hardware import Hardware, choose_hardware
from tasks.partitions.attempt import ask
from tasks.prompts.prompt import RequestForm
from tasks.prompts.text_codec import TextCodec
from tasks.runs.infer_job import InferJob
from tasks.storage.plan_file import PlanSummary, read_partition
from tasks.workers.engine_team import EngineTeam

MOST_TIME_SHARE = 0.01
"""Share of the predicted time after which simulation stops; the other partitions are extrapolated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrediction:
    """The prediction of a whole run from simulated partitions of its plan.

    Attributes:
        simulated: steps, tokens and times of the simulated partitions, of all engines together.
        scale: cost of the whole plan over that of the simulated partitions.
        partition_seconds: of each partition; for those that were not simulated, in proportion to the plan's costs.
        seconds, tecd_seconds: until the last engine is done, with and without the cool-down of the last partition.
    """

    simulated: SimulationSummary
    num_simulated: int
    scale: float
    partition_seconds: Sequence[float]
    seconds: float
    tecd_seconds: float


def predict(
    simulate: Callable[[int], SimulationSummary], plan: PlanSummary, num_engines: int, *, since: float | None = None
) -> RunPrediction:
    """Simulate the partition that is dispatched last, then others spread over the plan.

    Args:
        simulate: takes the number of a partition.
        plan: with costs and dispatch order; a single engine takes the partitions by number.
        since: `time.perf_counter` at the start of a prediction that may stop early: it simulates at least two
            partitions, and others as `MOST_TIME_SHARE` allows. None to simulate all.
    """
    costs, num_partitions = plan.partition_costs, plan.num_partitions
    order = plan.dispatch_order if num_engines > 1 else range(num_partitions)
    last = order[-1]
    done: dict[int, SimulationSummary] = {}
    scale = 1.0
    for partition in [last, *(partition for partition in spread(num_partitions) if partition != last)]:
        if since is not None and len(done) > 1:
            predicted_seconds = scale * sum(run.seconds for run in done.values()) / num_engines
            if time.perf_counter() - since > MOST_TIME_SHARE * predicted_seconds:
                break
        done[partition] = simulate(partition)
        scale = sum(costs) / sum(costs[known] for known in done)
    simulated = reduce(add, (done[partition] for partition in sorted(done)))
    seconds_per_cost = scale * simulated.seconds / sum(costs)
    partition_seconds = [
        done[number].seconds if number in done else cost * seconds_per_cost for number, cost in enumerate(costs)
    ]
    seconds = max(end for _, end in hand_out(order, partition_seconds, num_engines).values())
    return RunPrediction(
        simulated=simulated,
        num_simulated=len(done),
        scale=scale,
        partition_seconds=partition_seconds,
        seconds=seconds,
        tecd_seconds=max(0.0, seconds - done[last].cool_down_seconds),
    )


def hand_out(
    order: Iterable[int], partition_seconds: Sequence[float], num_engines: int
) -> dict[int, tuple[float, float]]:
    """Seconds until each partition begins and ends, if the engine that is free first takes the next. See
    `flows.workers`.

    Args:
        order, partition_seconds: in which partitions are taken, and of each, by its number.
    """
    free_at, spans = [0.0] * num_engines, {}
    for partition in order:
        begin = free_at[0]
        spans[partition] = begin, begin + partition_seconds[partition]
        heapq.heapreplace(free_at, spans[partition][1])
    return spans


def find_fitting(
    order: Sequence[int], seconds: Sequence[float], num_engines: int, seconds_left: float
) -> dict[int, float]:
    """The share done of each partition that begins in `seconds_left`; each takes its `seconds`. See `hand_out`."""
    return {
        partition: 1.0 if end <= seconds_left else (seconds_left - begin) / seconds[partition]
        for partition, (begin, end) in hand_out(order, seconds, num_engines).items()
        if end <= seconds_left or begin < seconds_left
    }


def spread(count: int) -> list[int]:
    """0 to count - 1 in bit-reversed order: any first few of them are spread over the whole range."""
    num_bits = max(count - 1, 0).bit_length()
    backwards = (int(f"{number:0{num_bits}b}"[::-1], 2) if num_bits else 0 for number in range(1 << num_bits))
    return [number for number in backwards if number < count]


@task(name="predict", retries=0, cache_policy=NO_CACHE, persist_result=False)
def predict_run(
    job: InferJob,
    summary: PlanSummary,
    team: EngineTeam,
    seconds_left: float | None = None,
    speed_ratio: float = 1.0,
    hardware: Hardware | None = None,
) -> dict[str, float]:
    """Steps, tokens, memory and time of a run, before its model is loaded, from some of its partitions.

    Returns quantities named as in `RunFacts.prediction`, num_simulated_partitions of num_partitions, and speed_ratio;
    with a deadline also num_fitting_partitions and num_fitting_prompts, done by then, where prompts of a cut partition
    count, too, and num_begun_partitions.

    Args:
        job, summary: of one workload, or of several that are planned together, and of the plan.
        seconds_left: until the deadline, if there is one.
        speed_ratio: real over simulated time of a step.
        hardware: the team's; looked up if None.
    Raises:
        ArtifactError: the plan is not what its reference says.
        CapacityError, ConfigError, ModelError: the device cannot hold the model, or their cost is not known.
    """
    engine, checkpoint = team.engine, Path(job.checkpoint)
    if hardware is None:
        hardware = choose_hardware(checkpoint, team)
    has_labels = any(member.workload.kind.has_labels for member in job.members)
    codec = TextCodec.load(checkpoint) if has_labels else None
    started = time.perf_counter()
    kv_bytes = hardware.kv_bytes(engine)

    def simulate(partition: int) -> SimulationSummary:
        rows = read_partition(job.plan, partition)
        requests = ask(rows, job, lambda workload, length: RequestForm.of(workload, codec, length))
        return hardware.simulate(requests, rows.groups(), engine, kv_bytes)

    found = predict(simulate, summary, team.num_engines, since=started)
    fitting = {}
    if seconds_left is not None:
        partition_seconds = [speed_ratio * seconds for seconds in found.partition_seconds]
        shares = find_fitting(summary.dispatch_order, partition_seconds, team.num_engines, seconds_left)
        num_rows = summary.partition_rows
        fitting = {
            "num_begun_partitions": len(shares),
            "num_fitting_partitions": sum(share == 1 for share in shares.values()),
            "num_fitting_prompts": float(sum(int(share * num_rows[partition]) for partition, share in shares.items())),
        }
    return fitting | {
        "num_steps": found.scale * found.simulated.num_steps,
        "num_computed_tokens": found.scale * found.simulated.num_computed_tokens,
        "num_preempted_requests": found.scale * found.simulated.num_preempted_requests,
        "peak_kv_blocks": found.simulated.peak_kv_blocks,
        "step_seconds": speed_ratio * found.scale * found.simulated.seconds,
        "elapsed_seconds": speed_ratio * found.seconds,
        "tecd_seconds": speed_ratio * found.tecd_seconds,
        "num_simulated_partitions": found.num_simulated,
        "num_partitions": summary.num_partitions,
        "num_engines": team.num_engines,
        "speed_ratio": speed_ratio,
    }
