"""A model of which this process loads one rank's share."""

import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear

from engine.config import EngineConfig
from engine.conflicts import check_gpus
from engine.errors import ConfigError, ModelError
from engine.model.loading.checkpoint import PLAIN_MODEL_TYPES, is_plain, read_json
from engine.model.loading.gguf import unpack_gguf
from engine.model.loading.other_weights import refuse_missing
from engine.model.model import Model
from engine.model.plain.plain_checkpoint import fill_model
from engine.model.plain.plain_model import Linear
from engine.model.plain.skeleton import make_skeleton, read_config_of
from engine.model.shard import Shard

if TYPE_CHECKING:
    import transformers

_SHARED_OUT = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Sizes of a config that are divided among the ranks."""


class ShardedModel(Model):
    """One rank's share of a model; its embeddings and its output layer are whole."""

    @classmethod
    def load_share(
        cls,
        source: "Path | transformers.PreTrainedModel",
        *,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard,
    ) -> "ShardedModel":
        """Reads this rank's part of each tensor.

        Args:
            source: a folder of `resolve_checkpoint`.
            dtype: of weights, KV and computation.
        Raises:
            ConfigError: a size of the model is not divisible by the number of ranks.
            ModelError: not readable, or not a plain model.
        """
        assert isinstance(source, Path), "conflicts.check_model refuses loaded models"
        folder = unpack_gguf(source)
        check_shares(folder, shard.size)
        language_model = make_skeleton(folder, dtype, lambda config: divide_config(config, shard.size))
        for layer in language_model.get_decoder().layers:
            for part, name in ((layer.self_attn, "o_proj"), (layer.mlp, "down_proj")):
                setattr(part, name, RowShardedLinear(getattr(part, name), shard))
        if not fill_model(language_model, folder, device, partial(_cut, shard)):
            refuse_missing(["lm_head.weight"], folder)
        made = cls(language_model, device=device, owns_weights=True)
        made.shard = shard
        return made


class RowShardedLinear(Linear):
    """A linear layer of which this rank has a range of input channels; results are summed over the ranks. It replaces
    `whole`, on the meta device; only rank 0 adds its bias."""

    def __init__(self, whole: torch.nn.Linear, shard: Shard) -> None:
        has_bias = whole.bias is not None and shard.rank == 0
        super().__init__(
            whole.in_features, whole.out_features, has_bias, device=whole.weight.device, dtype=whole.weight.dtype
        )
        self.all_reduce = shard.all_reduce

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        partial_sum = linear(values, self.weight, self.bias)
        self.all_reduce(partial_sum)
        return partial_sum


def check_ranks(config: EngineConfig, folder: Path) -> None:
    """Refuses a checkpoint that cannot be divided among the ranks, before processes are started: `ConfigError` if a
    size is not divisible by their number, or there are too few GPUs; `ModelError` if it is not a plain model."""
    check_gpus(config)
    check_shares(folder, config.tensor_parallel_size)


def check_shares(folder: Path, size: int) -> None:
    """Refuses a checkpoint that cannot be divided among `size` ranks. Raises as `ShardedModel.load_share`."""
    values = read_json(folder / "config.json")
    if "quantization_config" in values:
        raise ModelError(f"model {str(folder)!r}: tensor_parallel_size {size} is not for quantized weights")
    if not is_plain(values):
        raise ModelError(
            f"model {str(folder)!r}: tensor_parallel_size {size} is for plain models of the types "
            f"{', '.join(PLAIN_MODEL_TYPES)}, this one is {values.get('model_type')!r}"
        )
    divide_config(read_config_of(folder), size)


def divide_config(config: Any, size: int) -> Any:
    """The config of one rank's share: a model with fewer heads and a narrower MLP, and the same hidden size. Raises
    `ConfigError` if a size that is divided is not a multiple of `size`."""
    share = copy.deepcopy(config)
    share.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in _SHARED_OUT:
        value = getattr(config, name)
        if value % size:
            raise ConfigError(f"tensor_parallel_size {size} does not divide the model's {name}, {value}")
        setattr(share, name, value // size)
    return share


def _cut(shard: Shard, file: Any, name: str, shape: torch.Size) -> torch.Tensor:
    """The rank's part of a tensor in a file, cut along the dimension, if any, in which `shape` is smaller."""
    whole = file.get_slice(name)
    ranges = (
        slice(0, part) if size == part else slice(shard.rank * part, (shard.rank + 1) * part)
        for size, part in zip(whole.get_shape(), shape, strict=True)
    )
    tensor: torch.Tensor = whole[tuple(ranges)]
    return tensor.contiguous()
