"""The engines that run in parallel: how many, and on which devices."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from engine.config import EngineConfig
from engine.cores import usable_threads
from engine.errors import ConfigError

ALL_GPUS = ("auto", "cuda")
"""Settings of `device` that mean all GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTeam:
    """The engines of a run.

    Attributes:
        num_on_host: engines of each host; on a CPU they share it.
        environments: for each engine's process on this host, environment variables that choose its device; empty if
            the device is chosen elsewhere.
    """

    num_engines: int = 1
    num_on_host: int = 1
    engine: EngineConfig
    environments: tuple[Mapping[str, str], ...] = ({},)


def lay_out_workers(workers: int | Literal["auto"], engine: EngineConfig) -> EngineTeam:
    """The engines of this host; on a CPU they share its threads and KV memory. An engine of tensor_parallel_size n
    takes n consecutive GPUs. Raises `ConfigError` if there are more workers than GPUs.

    Args:
        workers: the number of engines. "auto" is one for each visible GPU; or one engine if the device is a CPU or
            names a GPU, or if one engine uses several GPUs.
        engine: the settings as the user gave them, for all engines together.
    """
    size = engine.tensor_parallel_size
    gpus = _visible_gpus(size) if engine.device in ALL_GPUS and workers != 1 else []
    is_spread = engine.disaggregation == "processes"  # the engine prefills on a second GPU
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
    else:
        engine = replace(engine, device="cuda")  # in a process whose GPU is gone, "auto" would be the CPU
    return EngineTeam(num_engines=num_workers, num_on_host=num_workers, engine=engine, environments=environments)


def _divide(engine: EngineConfig, num_workers: int) -> EngineConfig:
    import torch  # seconds to import; a night without new rows does not need it

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
    """For each visible GPU, or each `num_together` consecutive ones, the environment variable that selects them."""
    import torch

    names = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if torch.version.hip else ("CUDA_VISIBLE_DEVICES",)
    name = next((name for name in names if name in os.environ), names[0])
    num_gpus = torch.cuda.device_count()
    gpus = [gpu.strip() for gpu in os.environ[name].split(",")] if name in os.environ else [*map(str, range(num_gpus))]
    if num_gpus == 0 or not gpus[0].startswith("MIG-"):  # of several MIG devices, CUDA shows a process the first alone
        gpus = gpus[:num_gpus]
    firsts = range(0, len(gpus) - num_together + 1, num_together)
    return [{name: ",".join(gpus[first : first + num_together])} for first in firsts]
