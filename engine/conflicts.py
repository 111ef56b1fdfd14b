"""Settings of an engine that exclude each other, or do not go with its model or with the GPUs that are here."""

from typing import Any

from engine.errors import ConfigError

_DETERMINISTIC: dict[str, tuple[Any, ...]] = {
    "dtype": ("auto", "bfloat16", "float32", "int8", "quantized"),
    "attention": ("auto", "native"),
    "device": ("auto", "cpu"),
    "keep_prefixes_bytes": (0,),
    "tensor_parallel_size": (1,),
}
"""Values with which an answer's bits do not depend on the rest of the batch."""


def refuse_conflicts(config: Any) -> None:
    """Raises `ConfigError` where a setting of an `EngineConfig` does not go with the others."""
    if config.packing != "ragged" and config.prefill != "whole":
        raise ConfigError(
            f"packing {config.packing!r} needs whole prompts, and prefill {config.prefill!r} cuts them: set prefill to "
            "'whole'"
        )
    if config.disaggregation != "none":
        elsewhere = "with disaggregation 'processes' another process computes prompts"
        why = f"needs the KV of the process that decodes, and {elsewhere}"
        _refuse(config, why, ("sharing", "lru", "path, group or none"), ("preemption", "swap", "recompute or kill"))
    if config.tensor_parallel_size > 1:
        _refuse(
            config,
            f"does not go with a model on {config.tensor_parallel_size} devices (tensor_parallel_size)",
            ("disaggregation", "processes", "none"),
            ("preemption", "swap", "recompute or kill"),
            *(("dtype", dtype, "bfloat16, float16 or float32") for dtype in ("fp8", "int8", "quantized")),
            ("keep_prefixes_bytes", config.keep_prefixes_bytes or None, "0"),
            ("attention", "native", "auto, or torch on a CPU"),
            ("compile", "always", "auto or never"),
        )
    if config.keep_prefixes_bytes and (config.disaggregation != "none" or config.sharing in ("lru", "none")):
        raise ConfigError("keep_prefixes needs sharing path or group, and disaggregation none")
    if config.dtype == "fp8" and config.attention in ("native", "torch"):
        raise ConfigError(f"dtype 'fp8' is computed on a GPU, not by attention {config.attention!r}")
    if config.deterministic:
        for name, values in _DETERMINISTIC.items():
            if (value := getattr(config, name)) not in values:
                raise ConfigError(f"deterministic goes with {name} {' or '.join(map(repr, values))}, got {value!r}")
    if config.dtype in ("int8", "quantized") and (
        config.device.startswith("cuda") or config.attention not in ("auto", "native")
    ):
        raise ConfigError(
            f"dtype {config.dtype!r} is computed on a CPU by attention 'native', got device {config.device!r} and "
            f"attention {config.attention!r}"
        )


def _refuse(config: Any, why: str, *refused: tuple[str, Any, str]) -> None:
    """Refuses settings that work with one process or one device only: names, values, and what to set instead."""
    for name, value, others in refused:
        if getattr(config, name) == value:
            raise ConfigError(f"{name} {value!r} {why}: set {name} to {others}")


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
