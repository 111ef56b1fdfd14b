"""Which layers of a model have a sliding window, by its config."""

from collections.abc import Mapping
from typing import Any

from engine.errors import ModelError
from engine.model.loading.checkpoint import is_plain
from engine.model.loading.config_sizes import read_size


def find_windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The window of each layer: how many positions a row sees, its own included; 0: all. Empty if no layer has one. The
    config is the text model's, with transformers' defaults. Raises `ModelError` if a value of it cannot be used."""
    family, num_layers = config.get("model_type"), int(config["num_hidden_layers"])
    if family == "llama":  # transformers' Llama ignores sliding_window
        return ()
    window, longest, num_full = (
        read_size(config, name) if config.get(name) else 0
        for name in ("sliding_window", "max_position_embeddings", "max_window_layers")
    )
    if not window or 0 < longest <= window:
        return ()
    if family == "mistral":  # transformers' Mistral ignores use_sliding_window and layer_types
        return (window,) * num_layers
    if config.get("use_sliding_window", family not in ("qwen2", "qwen3")) is False:  # Qwen's default
        return ()
    kinds = config.get("layer_types") or ["full"] * min(num_full, num_layers) + ["sliding"] * (num_layers - num_full)
    if not isinstance(kinds, list | tuple) or len(kinds) != num_layers:
        raise ModelError(f"config.json: layer_types must name the kind of each of {num_layers} layers, got {kinds!r}")
    windows = tuple(window if "sliding" in str(kind) else 0 for kind in kinds)
    return windows if any(windows) else ()


def window_of(sliding_window: int | None, config: Any) -> int:
    """The `window` of `Scoring`; 0 where a sliding window is not shorter than the model's context."""
    return 0 if sliding_window is None or sliding_window >= config.max_position_embeddings else int(sliding_window)


def find_kept_windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    """As `find_windows`, for freeing KV outside windows. Also empty for plain models in which only some layers have a
    window, since their layers share one block table."""
    windows = find_windows(config)
    return () if 0 in windows and is_plain(config) else windows
