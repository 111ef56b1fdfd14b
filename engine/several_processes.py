"""Checks for several processes that compute one model: each can load the checkpoint, and there are enough GPUs."""

from typing import Any

from engine.errors import ConfigError


def check_model(config: Any, *, is_loaded: bool, is_adapted: bool) -> None:
    """Refuses a model that another process cannot load from a checkpoint.

    Args:
        config: an `EngineConfig`.
        is_loaded, is_adapted: whether the model was given as an object, and whether it has adapters.
    """
    is_spread = config.tensor_parallel_size > 1
    several = f"tensor_parallel_size {config.tensor_parallel_size}" if is_spread else "disaggregation 'processes'"
    if is_adapted:
        raise ConfigError(f"{several} computes without adapters")
    if is_loaded:
        who = "all ranks" if is_spread else "both"
        raise ConfigError(f"{several} needs a checkpoint that {who} load, got a loaded model")


def check_gpus(config: Any) -> None:
    """Refuses more ranks than there are GPUs from the device of an `EngineConfig` on. Ranks share a CPU."""
    import torch

    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return
    first = 0 if config.device == "auto" else torch.device(config.device).index or 0
    num_gpus = torch.cuda.device_count()
    if first + config.tensor_parallel_size > num_gpus:
        size = config.tensor_parallel_size
        raise ConfigError(f"tensor_parallel_size {size}, device {config.device!r}: torch finds {num_gpus} GPUs here")
