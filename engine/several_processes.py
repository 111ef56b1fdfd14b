"""What is refused where several processes compute one model: disaggregated prompts, or ranks that share its layers."""

from typing import Any

from engine.errors import ConfigError


def check_policies(config: Any) -> None:
    """Refuses settings that know of one process or one device only.

    Args:
        config: an `EngineConfig`.
    """
    if config.disaggregation != "none":
        for name, value, others in (
            ("sharing", "lru", "path, group or none"),
            ("preemption", "swap", "recompute or kill"),
        ):
            if getattr(config, name) == value:
                raise ConfigError(
                    f"{name} {value!r} finds KV that only the process that decodes has, and with disaggregation "
                    f"{config.disaggregation!r} another one computes prompts: set {name} to {others}"
                )
    if config.tensor_parallel_size > 1:
        refused: tuple[tuple[str, Any, str], ...] = (
            ("disaggregation", "processes", "none"),
            ("preemption", "swap", "recompute or kill"),
            ("dtype", "fp8", "bfloat16, float16 or float32"),
            ("dtype", "int8", "bfloat16, float16 or float32"),
            ("dtype", "quantized", "bfloat16, float16 or float32"),
            ("keep_prefixes_bytes", config.keep_prefixes_bytes or None, "0"),
            ("attention", "native", "auto, or torch on a CPU"),
            ("compile", "always", "auto or never"),
        )
        for name, value, others in refused:
            if getattr(config, name) == value:
                raise ConfigError(
                    f"{name} {value!r} does not go with a model on {config.tensor_parallel_size} devices "
                    f"(tensor_parallel_size): set {name} to {others}"
                )


def check_model(config: Any, *, is_loaded: bool, is_adapted: bool) -> None:
    """Refuses a model that another process cannot load from a checkpoint.

    Args:
        config: an `EngineConfig`.
        is_loaded: whether the model was given as an object.
        is_adapted: whether it has adapters.
    """
    is_spread = config.tensor_parallel_size > 1
    several = f"tensor_parallel_size {config.tensor_parallel_size}" if is_spread else "disaggregation 'processes'"
    if is_adapted:
        raise ConfigError(f"{several} computes without adapters")
    if is_loaded:
        who = "all ranks" if is_spread else "both"
        raise ConfigError(f"{several} needs a checkpoint that {who} load, got a loaded model")


def check_gpus(config: Any) -> None:
    """Refuses more ranks than there are GPUs from the engine's device on. Ranks share a CPU.

    Args:
        config: an `EngineConfig`.
    """
    import torch

    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return
    first = 0 if config.device == "auto" else torch.device(config.device).index or 0
    num_gpus = torch.cuda.device_count()
    if first + config.tensor_parallel_size > num_gpus:
        size = config.tensor_parallel_size
        raise ConfigError(f"tensor_parallel_size {size}, device {config.device!r}: torch finds {num_gpus} GPUs here")
