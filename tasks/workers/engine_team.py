"""The engines that work side by side in a run: how many, on which devices, and which partitions each comes to take."""

import heapq
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from engine.config import EngineConfig
from engine.device.placement import usable_threads
from engine.errors import ConfigError

ALL_GPUS = ("auto", "cuda")
"""Settings of the device that name none in particular."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTeam:
    """How many engines there are.

    Attributes:
        num_engines: in all.
        num_on_host: of these, on each host; on a CPU they divide it.
        engine: the settings of each.
        environments: of each engine's process on this host, variables that say which device it sees; empty where
            another one decides.
    """

    num_engines: int = 1
    num_on_host: int = 1
    engine: EngineConfig
    environments: tuple[Mapping[str, str], ...] = ({},)


def lay_out_workers(workers: int | Literal["auto"], engine: EngineConfig) -> EngineTeam:
    """The engines of this host: one for each visible GPU, or so many; on a CPU they divide its threads and KV memory.

    An engine of tensor_parallel_size n takes n GPUs that follow each other.

    Args:
        workers: "auto" is one for each GPU, and one where the device is a CPU or names one GPU, or where one engine is
            spread over several.
        engine: the settings as the user gave them, for all engines together.
    Raises:
        ConfigError: more workers than GPUs.
    """
    size = engine.tensor_parallel_size
    gpus = _visible_gpus(size) if engine.device in ALL_GPUS and workers != 1 else []
    is_spread = engine.disaggregation == "processes"  # one engine computes its prompts on the next GPU
    num_workers = workers if workers != "auto" else 1 if is_spread else max(1, len(gpus))
    if num_workers == 1:
        return EngineTeam(engine=engine)
    environments: tuple[Mapping[str, str], ...] = tuple(gpus[:num_workers])
    if not gpus:
        if engine.device not in ("auto", "cpu"):
            raise ConfigError(f"{num_workers} workers need a GPU each, and device is {engine.device!r}")
        environments, engine = ({},) * num_workers, _divide(engine, num_workers)
    elif num_workers > len(gpus):
        needed = "a GPU" if size == 1 else f"{size} GPUs (tensor_parallel_size)"
        raise ConfigError(f"{num_workers} workers need {needed} each, and {len(gpus) * size} are visible")
    return EngineTeam(num_engines=num_workers, num_on_host=num_workers, engine=engine, environments=environments)


def hand_out(order: Iterable[int], partition_seconds: Sequence[float], num_engines: int) -> dict[int, float]:
    """Seconds until each partition is done, where the engine that is free first takes the next. See `flows.workers`.

    Args:
        order: in which partitions are handed out.
        partition_seconds: that each takes, by its number.
        num_engines: that work side by side.
    """
    free_at, ends = [0.0] * num_engines, {}
    for partition in order:
        ends[partition] = free_at[0] + partition_seconds[partition]
        heapq.heapreplace(free_at, ends[partition])
    return ends


def _divide(engine: EngineConfig, num_workers: int) -> EngineConfig:
    import torch  # seconds, and a night with nothing new has no use for it

    num_threads = max(1, (usable_threads(engine.num_threads) or torch.get_num_threads()) // num_workers)
    kv_bytes, swap_bytes = engine.kv_memory_bytes, engine.swap_memory_bytes
    return replace(
        engine,
        num_threads=num_threads,
        kv_memory_bytes=kv_bytes if kv_bytes == "auto" else max(1, kv_bytes // num_workers),
        memory_fraction=engine.memory_fraction / num_workers,
        swap_memory_bytes=swap_bytes if swap_bytes == "auto" else max(1, swap_bytes // num_workers),
    )


def _visible_gpus(num_together: int) -> list[dict[str, str]]:
    """For each GPU that this process sees, or so many together, the variable that makes them the only ones."""
    import torch

    names = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if torch.version.hip else ("CUDA_VISIBLE_DEVICES",)
    name = next((name for name in names if name in os.environ), names[0])
    num_gpus = torch.cuda.device_count()
    visible = os.environ[name].split(",") if name in os.environ else map(str, range(num_gpus))
    gpus = [gpu.strip() for gpu, _ in zip(visible, range(num_gpus), strict=False)]
    firsts = range(0, num_gpus - num_together + 1, num_together)
    return [{name: ",".join(gpus[first : first + num_together])} for first in firsts]
