"""A planned workload through the simulated engine, partition by partition as the nightly run has it, and what-ifs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from engine.config import EngineConfig
from engine.request import Request
from engine.simulation.simulation import SimulatedStep, find_oversized
from engine.simulation.simulation_summary import SimulationSummary, summarize_steps
from tasks.forecast.answer_length import AnswerLength
from tasks.forecast.forecast import KVMemory, Prediction, WhatIf
from tasks.forecast.hardware import Hardware
from tasks.forecast.simulator import Simulator
from tasks.partitions.planned_rows import PlannedRows
from tasks.workers.engine_team import hand_out

WHAT_IF_PARTITIONS = 4
"""Partitions on which a changed setting is tried."""

MORE_TOKENS = 4
"""By which chunk and partition are multiplied to see whether that helps; memory is doubled."""


def predict(
    rows: PlannedRows,
    requests: Sequence[Request],
    config: EngineConfig,
    hardware: Hardware,
    answer: AnswerLength,
    *,
    dispatch_order: Sequence[int] = (),
    num_engines: int = 1,
) -> Prediction:
    """Simulates every partition, one after the other, and tries what could help on a few of them.

    Args:
        requests: of all rows, in their order.
        dispatch_order: in which several engines take the partitions; of no account where there is one.
    Raises:
        CapacityError: see `Hardware.kv_budget_bytes`.
        ConfigError: the device has no rate for the number format.
    """
    budget_bytes = hardware.kv_budget_bytes(config)
    simulation = _Simulation(rows=rows, requests=requests, simulator=Simulator(hardware, answer))
    seconds_of: list[float] = []

    def watched(partition: int) -> Iterable[SimulatedStep]:
        seconds_of.append(0.0)
        for step in simulation.run(config, budget_bytes, partition, 1):
            seconds_of[-1] += step.cost.seconds
            yield step

    run = summarize_steps(chain.from_iterable(map(watched, range(rows.num_partitions))))
    shares = hand_out(dispatch_order, seconds_of, num_engines) if num_engines > 1 else []
    block_bytes = config.block_size * hardware.shape.kv_bytes_per_token
    return Prediction(
        device=hardware.device,
        dtype=hardware.dtype,
        weight_bytes=hardware.shape.weight_bytes,
        kv=KVMemory(budget_bytes=budget_bytes, peak_bytes=run.peak_kv_blocks * block_bytes),
        answer=answer,
        num_oversized_rows=len(find_oversized(requests, config.block_size, budget_bytes // block_bytes)),
        num_engines=num_engines,
        seconds=max((share.seconds for share in shares), default=run.seconds),
        run=run,
        what_ifs=_try_settings(simulation, config, budget_bytes, run, seconds_of),
    )


def _try_settings(
    simulation: "_Simulation", config: EngineConfig, budget_bytes: int, run: SimulationSummary, seconds_of: list[float]
) -> tuple[WhatIf, ...]:
    """Each setting alone, on a few partitions spread over the plan or on consecutive ones."""
    num_partitions = len(seconds_of)
    num_tried = min(WHAT_IF_PARTITIONS, num_partitions)
    spread = [index * num_partitions // num_tried for index in range(num_tried)]
    spread_seconds = sum(seconds_of[partition] for partition in spread)
    longer = replace(config, max_num_batched_tokens=MORE_TOKENS * config.max_num_batched_tokens)
    tried = [(f"--max-num-batched-tokens {longer.max_num_batched_tokens}", longer, budget_bytes)]
    if run.seconds_by_resource["KV capacity"] > 0:
        tried.append((f"--kv-memory {2 * budget_bytes >> 20}MiB", config, 2 * budget_bytes))
    what_ifs = []
    for option, changed, kv_bytes in tried:
        steps = chain.from_iterable(simulation.run(changed, kv_bytes, partition, 1) for partition in spread)
        ratio = summarize_steps(steps).seconds / spread_seconds
        what_ifs.append(WhatIf(option=option, time_ratio=ratio, num_partitions=num_tried))
    if num_partitions > 1:
        num_joined = min(MORE_TOKENS, num_partitions)
        first = (num_partitions - num_joined) // 2
        seconds = summarize_steps(simulation.run(config, budget_bytes, first, num_joined)).seconds
        ratio = seconds / sum(seconds_of[first : first + num_joined])
        option = f"--partition-tokens times {num_joined}"
        what_ifs.append(WhatIf(option=option, time_ratio=ratio, num_partitions=num_joined))
    return tuple(sorted(what_ifs, key=lambda what_if: what_if.time_ratio))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Simulation:
    """Runs consecutive partitions as one plan, under any configuration."""

    rows: PlannedRows
    requests: Sequence[Request]
    simulator: Simulator

    def run(
        self, config: EngineConfig, budget_bytes: int, first_partition: int, num_partitions: int
    ) -> Iterable[SimulatedStep]:
        requests = self.requests[self.rows.rows(first_partition, num_partitions)]
        return self.simulator.run(requests, self.rows.groups(first_partition, num_partitions), config, budget_bytes)
