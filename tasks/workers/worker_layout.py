"""How many engines a host has, which device each one sees, and what it takes of a memory that they share."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from engine.config import EngineConfig
from engine.errors import ConfigError

ALL_GPUS = ("auto", "cuda")
"""Settings of the device that name none in particular."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLayout:
    """The engines of a host.

    Attributes:
        environments: of each engine's process, variables that say which device it sees.
        engine: the settings of each.
    """

    environments: tuple[Mapping[str, str], ...]
    engine: EngineConfig


def lay_out_workers(workers: int | Literal["auto"], engine: EngineConfig) -> WorkerLayout:
    """One engine for each GPU that is visible, or so many; on a CPU they divide its threads and the KV memory.

    Args:
        workers: "auto" is one for each GPU, and one where the device is a CPU or names one GPU, or where one engine is
            spread over several.
    Raises:
        ConfigError: more workers than GPUs.
    """
    gpus = _visible_gpus() if engine.device in ALL_GPUS and workers != 1 else []
    is_spread = engine.disaggregation == "processes"  # one engine computes its prompts on the next GPU
    num_workers = workers if workers != "auto" else 1 if is_spread else max(1, len(gpus))
    if num_workers == 1:
        return WorkerLayout(environments=({},), engine=engine)
    if gpus:
        if num_workers > len(gpus):
            raise ConfigError(f"{num_workers} workers need a GPU each, and {len(gpus)} are visible")
        return WorkerLayout(environments=tuple(gpus[:num_workers]), engine=engine)
    if engine.device not in ("auto", "cpu"):
        raise ConfigError(f"{num_workers} workers need a GPU each, and device is {engine.device!r}")
    return WorkerLayout(environments=({},) * num_workers, engine=_divide(engine, num_workers))


def _divide(engine: EngineConfig, num_workers: int) -> EngineConfig:
    import torch  # seconds, and a night with nothing new has no use for it

    num_threads = max(1, (engine.num_threads or torch.get_num_threads()) // num_workers)
    kv_bytes, swap_bytes = engine.kv_memory_bytes, engine.swap_memory_bytes
    return replace(
        engine,
        num_threads=num_threads,
        kv_memory_bytes=kv_bytes if kv_bytes == "auto" else max(1, kv_bytes // num_workers),
        memory_fraction=engine.memory_fraction / num_workers,
        swap_memory_bytes=swap_bytes if swap_bytes == "auto" else max(1, swap_bytes // num_workers),
    )


def _visible_gpus() -> list[dict[str, str]]:
    """For each GPU that this process sees, the variable that makes it the only one."""
    import torch

    names = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if torch.version.hip else ("CUDA_VISIBLE_DEVICES",)
    name = next((name for name in names if name in os.environ), names[0])
    num_gpus = torch.cuda.device_count()
    visible = os.environ[name].split(",") if name in os.environ else map(str, range(num_gpus))
    return [{name: gpu.strip()} for gpu, _ in zip(visible, range(num_gpus), strict=False)]
