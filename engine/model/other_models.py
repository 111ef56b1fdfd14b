"""Loads models that are sharded, adapted by LoRA, or quantized."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.config import EngineConfig
from engine.device.placement import find_dtype
from engine.errors import ModelError
from engine.model.model import Model

if TYPE_CHECKING:
    import transformers

    from engine.model.adapters.adapter import Adapter
    from engine.model.shard import Shard


def load_other(
    model: "str | Path | transformers.PreTrainedModel",
    config: EngineConfig,
    device: torch.device,
    *,
    adapter: "Adapter | None",
    keeps_base: bool,
    shard: "Shard | None",
    **how: Any,
) -> Model:
    """Loads one rank's share of a model, an adapted model, or one with quantized weights.

    Args:
        model, adapter, keeps_base, shard: as for `engine.Engine.load`.
        how: `make_engine` of `Model.load`.
    Raises:
        ConfigError: the device does not support the number format, or the checkpoint is not quantized.
        ModelError: as `Model.load`.
    """
    if shard is not None:
        from engine.model.sharded_model import ShardedModel

        return ShardedModel.load_share(model, dtype=find_dtype(config.dtype, device), device=device, shard=shard)
    if adapter is not None or keeps_base:
        from engine.model.adapters.adapted_model import AdaptedModel
        from engine.model.adapters.adapter import Adapter

        if not isinstance(adapter, Adapter | None):
            raise ModelError(f"adapter must be an Adapter, as Adapter.find(folder) makes, got {adapter!r}")
        dtype = find_dtype(config.dtype, device)
        return AdaptedModel.load_with(adapter, model, dtype=dtype, device=device, keeps_base=keeps_base, **how)
    from engine.model.quantized.quantized_model import load_quantized

    assert isinstance(model, (str, Path)), "only checkpoints are quantized"
    quantized = load_quantized(model, config, device, **how)
    return quantized or Model.load(model, dtype=find_dtype(config.dtype, device), device=device, **how)
