"""The simulation again with one setting changed, on a few partitions, to see whether that helps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.config import EngineConfig
from engine.simulation.simulation_summary import SimulationSummary

WHAT_IF_PARTITIONS = 4
"""Partitions on which a changed setting is tried."""

MORE_TOKENS = 4
"""By which step and partition are multiplied to see whether that helps; memory is doubled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The simulation again with one setting changed.

    Attributes:
        option: of the command line, with its value.
        time_ratio: predicted time with it against without it; below 1 is faster.
        num_partitions: on which both were simulated.
    """

    option: str
    time_ratio: float
    num_partitions: int


def try_settings(
    simulate: Callable[[EngineConfig, int, int, int], SimulationSummary],
    config: EngineConfig,
    kv_bytes: int,
    run: SimulationSummary,
    partition_seconds: Sequence[float],
) -> tuple[WhatIf, ...]:
    """Each setting alone, on partitions spread over the plan or on consecutive ones; the most helpful one first.

    Args:
        simulate: with a configuration and so many bytes of KV, from a first partition, so many as one plan.
        config: as it is.
        kv_bytes: KV memory as it is.
        run: the simulation of all partitions as they are.
        partition_seconds: of each partition in it.
    """
    num_partitions = len(partition_seconds)
    num_tried = min(WHAT_IF_PARTITIONS, num_partitions)
    chosen = [index * num_partitions // num_tried for index in range(num_tried)]
    seconds_before = sum(partition_seconds[partition] for partition in chosen)
    longer = replace(config, max_num_batched_tokens=MORE_TOKENS * config.max_num_batched_tokens)
    tried = [(f"--max-num-batched-tokens {longer.max_num_batched_tokens}", longer, kv_bytes)]
    if run.seconds_by_resource["KV capacity"] > 0:
        tried.append((f"--kv-memory {2 * kv_bytes >> 20}MiB", config, 2 * kv_bytes))
    what_ifs = []
    for option, changed, changed_bytes in tried:
        seconds = sum(simulate(changed, changed_bytes, partition, 1).seconds for partition in chosen)
        what_ifs.append(WhatIf(option=option, time_ratio=seconds / seconds_before, num_partitions=num_tried))
    if num_partitions > 1:
        num_joined = min(MORE_TOKENS, num_partitions)
        first = (num_partitions - num_joined) // 2
        ratio = simulate(config, kv_bytes, first, num_joined).seconds / sum(partition_seconds[first:][:num_joined])
        option = f"--partition-tokens times {num_joined}"
        what_ifs.append(WhatIf(option=option, time_ratio=ratio, num_partitions=num_joined))
    return tuple(sorted(what_ifs, key=lambda what_if: what_if.time_ratio))
