"""Checks before a night that GPUs can compute a model."""

from pathlib import Path

from engine.config import EngineConfig
from engine.device.placement import resolve_device
from engine.encoding.families import is_encoder
from engine.errors import ConfigError
from engine.kernels.triton.shape import check_shape
from engine.model.loading.checkpoint import read_json
from engine.model.loading.config_sizes import read_head_dim, read_size, read_sizes


def check_gpus(config: EngineConfig, checkpoint: Path) -> None:
    """Raises `ConfigError` if a decoder is computed on a GPU, whose kernels do not support its heads or the block size;
    with several ranks also as `check_ranks`. `ModelError` if config.json lacks a size."""
    if config.tensor_parallel_size > 1:
        from engine.model.sharded_model import check_ranks  # takes seconds to import

        check_ranks(config, checkpoint)
    if is_encoder(checkpoint):
        return
    values = read_sizes(read_json(checkpoint / "config.json"))
    num_q_heads = read_size(values, "num_attention_heads")
    heads = {"num_q_heads": num_q_heads, "num_kv_heads": read_size(values, "num_key_value_heads", num_q_heads)}
    try:
        check_shape(**heads, head_dim=read_head_dim(values), block_size=config.block_size)
    except ValueError as error:
        if config.attention in ("paged", "relay", "fused") or resolve_device(config.device).type != "cpu":
            raise ConfigError(f"model {str(checkpoint)!r}: attention on a GPU: {error}") from error
