"""What a run will do, simulated partition by partition before it starts, for a small part of the time it takes."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from engine.planning.prefix_groups import rebuild_groups
from engine.simulation.simulation import SimulatedStep
from tasks.forecast.answer_length import AnswerLength
from tasks.forecast.hardware import choose_hardware
from tasks.forecast.simulator import Simulator
from tasks.partitions.partition import read_partition
from tasks.prompts.request_form import RequestForm
from tasks.prompts.text_codec import TextCodec
from tasks.storage.artifact import ArtifactRef
from tasks.storage.plan_file import PlanSummary
from tasks.workers.engine_team import EngineTeam, hand_out
from tasks.workloads.workload import Workload

FEWEST_TOKENS_TO_PREDICT = 50_000
"""Prompt tokens to compute: less is done before a device that is not in the table has been measured."""

MOST_TIME_SHARE = 0.01
"""Of the predicted time: once so much is spent on simulating, the partitions left are taken to be like the others."""


@dataclass(slots=True, kw_only=True)
class RunForecast:
    """Sums over the steps of the partitions that were simulated."""

    num_partitions: int = 0
    num_steps: int = 0
    num_computed_tokens: int = 0
    num_preempted_requests: int = 0
    peak_kv_blocks: int = 0
    step_seconds: float = 0.0

    def add_partition(self, steps: Iterable[SimulatedStep], max_num_batched_tokens: int) -> float:
        """Reads the steps once; returns the seconds of the partition's cool-down, as docs/report.md defines it."""
        cool_down_seconds = 0.0
        for step in steps:
            record, seconds = step.record, step.cost.seconds
            self.num_steps += 1
            self.num_computed_tokens += record.num_tokens
            self.num_preempted_requests += record.num_preempted_requests
            self.peak_kv_blocks = max(self.peak_kv_blocks, record.num_kv_blocks_used)
            self.step_seconds += seconds
            is_full = record.num_tokens + record.num_padding_tokens >= max_num_batched_tokens
            is_busy = is_full or record.num_waiting_requests > 0
            cool_down_seconds = 0.0 if is_busy else cool_down_seconds + seconds
        return cool_down_seconds


@task(name="predict", retries=0, cache_policy=NO_CACHE, persist_result=False)
def predict_run(
    plan: ArtifactRef,
    summary: PlanSummary,
    workload: Workload,
    answer: AnswerLength,
    checkpoint: Path,
    team: EngineTeam,
) -> dict[str, float]:
    """Steps, tokens, memory and time of a run, before its model is loaded.

    The partition that is handed out last is simulated, which tells the cool-down of each engine, and as many of the
    others, spread over the plan, as `MOST_TIME_SHARE` allows, at least one. What is left out is taken for as dear as
    the plan's costs say.

    Args:
        summary: of the plan.
        team: the engines; one alone takes the partitions in their order.
    Returns:
        quantity to value, as `RunFacts.prediction` names them, and num_simulated_partitions.
    Raises:
        ArtifactError: the plan is not what its reference says.
        CapacityError, ConfigError, ModelError: the device cannot hold the model, or their cost is not known.
    """
    started = time.perf_counter()
    engine = team.engine
    hardware = choose_hardware(engine.device.partition(":")[0], checkpoint, engine, team.num_on_host)
    budget_bytes = hardware.kv_budget_bytes(engine)
    codec = TextCodec.load(checkpoint) if workload.mode == "score" else None
    form = RequestForm.of(workload, codec, answer.expected_output_tokens)
    simulator = Simulator(hardware, answer)
    costs, num_partitions = summary.partition_costs, summary.num_partitions
    order = summary.dispatch_order if team.num_engines > 1 else range(num_partitions)
    last = order[-1]
    known_seconds: dict[int, float] = {}
    forecast, last_cool_down_seconds, scale = RunForecast(), 0.0, 1.0
    others = (partition for partition in spread(num_partitions) if partition != last)
    for number, partition in enumerate([last, *others]):
        is_dear = time.perf_counter() - started > MOST_TIME_SHARE * scale * forecast.step_seconds
        if number > 1 and is_dear:
            break
        rows = read_partition(plan, partition)
        groups = rebuild_groups(rows.prompts, rows.group_id, rows.member_id, rows.num_prefix_tokens)
        steps = simulator.run(form.ask(rows.row_ids, rows.prompts, rows.priority), groups, engine, budget_bytes)
        seconds_before = forecast.step_seconds
        cool_down_seconds = forecast.add_partition(steps, engine.max_num_batched_tokens)
        if partition == last:
            last_cool_down_seconds = cool_down_seconds
        known_seconds[partition] = forecast.step_seconds - seconds_before
        scale = sum(costs) / sum(costs[known] for known in known_seconds)
        forecast.num_partitions += 1
    seconds_per_cost = scale * forecast.step_seconds / sum(costs)
    all_seconds = [known_seconds.get(number, cost * seconds_per_cost) for number, cost in enumerate(costs)]
    elapsed_seconds = max(share.seconds for share in hand_out(order, all_seconds, team.num_engines))
    return {
        "num_steps": scale * forecast.num_steps,
        "num_computed_tokens": scale * forecast.num_computed_tokens,
        "num_preempted_requests": scale * forecast.num_preempted_requests,
        "peak_kv_blocks": forecast.peak_kv_blocks,
        "step_seconds": scale * forecast.step_seconds,
        "elapsed_seconds": elapsed_seconds,
        "tecd_seconds": max(0.0, elapsed_seconds - last_cool_down_seconds),
        "num_simulated_partitions": forecast.num_partitions,
    }


def spread(count: int) -> list[int]:
    """0 to count - 1 in an order whose beginnings are spread over all of it: the bits of each number backwards."""
    num_bits = max(count - 1, 0).bit_length()
    backwards = (int(f"{number:0{num_bits}b}"[::-1], 2) if num_bits else 0 for number in range(1 << num_bits))
    return [number for number in backwards if number < count]
