"""The engines that work side by side in a run, and which partitions each of them comes to take."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTeam:
    """How many engines there are.

    Attributes:
        num_engines: in all.
        num_on_host: of these, on each host; on a CPU they divide it.
        engine: the settings of each.
    """

    num_engines: int = 1
    num_on_host: int = 1
    engine: EngineConfig


@dataclass(slots=True, kw_only=True)
class EngineShare:
    """What one engine takes: its partitions in turn, and the seconds that they take together."""

    partitions: list[int] = field(default_factory=list)
    seconds: float = 0.0


def hand_out(order: Sequence[int], partition_seconds: Sequence[float], num_engines: int) -> list[EngineShare]:
    """Each partition to the engine that is free first, as `flows.workers` does.

    Args:
        order: in which partitions are handed out.
        partition_seconds: that each takes, by its number.
    """
    shares = [EngineShare() for _ in range(num_engines)]
    free_at = [(0.0, number) for number in range(num_engines)]
    for partition in order:
        _, number = free_at[0]
        share = shares[number]
        share.partitions.append(partition)
        share.seconds += partition_seconds[partition]
        heapq.heapreplace(free_at, (share.seconds, number))
    return shares
