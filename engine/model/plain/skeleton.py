"""Models without weights, whose weights are then read in a way of their own: quantized, or one rank's share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.model.plain.plain_checkpoint import empty_model, read_plain_config
from engine.model.plain.plain_model import PlainConfig


def read_config_of(folder: Path) -> Any:
    """The config of a checkpoint folder: a `PlainConfig`, or transformers' where `read_plain_config` returns None."""
    if (plain := read_plain_config(folder)) is not None:
        return plain
    from engine.model.loading.stock_weights import read_config  # seconds to import

    return read_config(folder)


def make_skeleton(folder: Path, dtype: torch.dtype, change: Callable[[Any], Any] = lambda config: config) -> Any:
    """The model of a plain architecture with weights on the meta device, but with rotary frequencies; `change` is
    applied to its config before. See `read_config_of`."""
    config = change(read_config_of(folder))
    if isinstance(config, PlainConfig):
        return empty_model(config, folder, dtype)
    from engine.model.loading.stock_weights import empty_stock_model  # seconds to import

    return empty_stock_model(config, folder, dtype)
