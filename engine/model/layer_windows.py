"""Which layers of a model have a sliding window, by its config."""

import math
from collections.abc import Mapping
from typing import Any

from engine.model.loading.checkpoint import is_plain


def find_windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The window of each layer: how many positions a row sees, its own included; 0: all. Empty if no layer has one. The
    config is the text model's, with transformers' defaults, which name the kind of each layer."""
    family, window = config.get("model_type"), config.get("sliding_window")
    num_layers = int(config["num_hidden_layers"])
    longest = config.get("max_position_embeddings") or math.inf
    if family == "llama" or not window or window >= longest:  # transformers' Llama ignores sliding_window
        return ()
    if family == "mistral":  # transformers' Mistral ignores use_sliding_window and layer_types
        return (int(window),) * num_layers
    if config.get("use_sliding_window") is False:
        return ()
    num_full = min(num_layers, int(config.get("max_window_layers") or 0))
    kinds = config.get("layer_types") or ["full"] * num_full + ["sliding"] * (num_layers - num_full)
    windows = tuple(int(window) if "sliding" in kind else 0 for kind in kinds)
    return windows if any(windows) else ()


def find_kept_windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    """As `find_windows`, for freeing KV outside windows. Also empty for plain models in which only some layers have a
    window, since their layers share one block table."""
    windows = find_windows(config)
    return () if 0 in windows and is_plain(config) else windows
