"""What is refused where results must not depend on what else is computed."""

from typing import Any

from engine.errors import ConfigError


def check_deterministic(config: Any) -> None:
    """Refuses settings that give no such promise.

    Args:
        config: an `EngineConfig`.
    """
    taken: tuple[tuple[str, tuple[Any, ...]], ...] = (
        ("dtype", ("auto", "bfloat16", "int8", "quantized")),
        ("attention", ("auto", "native")),
        ("device", ("auto", "cpu")),
        ("keep_prefixes_bytes", (0,)),
        ("tensor_parallel_size", (1,)),
    )
    for name, values in taken:
        if (value := getattr(config, name)) not in values:
            raise ConfigError(f"deterministic goes with {name} {' or '.join(map(repr, values))}, got {value!r}")
