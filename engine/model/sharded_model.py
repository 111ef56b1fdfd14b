"""A checkpoint of which this process reads the share of one rank."""

import copy
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import nn
from torch.nn.functional import linear

from engine.errors import ConfigError, ModelError
from engine.model.loading.checkpoint import PLAIN_MODEL_TYPES, is_plain, resolve_checkpoint
from engine.model.loading.stock_weights import read_config
from engine.model.model import Model
from engine.model.shard import Shard

_SHARED_OUT = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Sizes of a config of which each rank has its share."""


class ShardedModel(Model):
    """One rank's share of a model; its embeddings and its output layer are whole."""

    @classmethod
    def load_share(
        cls,
        model: str | Path | transformers.PreTrainedModel,
        *,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard,
    ) -> "ShardedModel":
        """Reads of each tensor the part that the rank computes with.

        Args:
            model: checkpoint folder, GGUF file or hub id.
            dtype: of weights, KV and computation.
            device: where the weights go.
            shard: this rank.
        Raises:
            ConfigError: the model does not divide into so many shares.
            ModelError: not readable, or an architecture other than those of the own layers.
        """
        assert not isinstance(model, transformers.PreTrainedModel), "a loaded model is refused before"
        folder = resolve_checkpoint(model)
        config = read_config(folder)
        if not is_plain(config.to_dict()):
            raise ModelError(
                f"model {str(folder)!r}: tensor_parallel_size {shard.size} is for plain models of the types "
                f"{', '.join(PLAIN_MODEL_TYPES)}, this one is {config.model_type!r}"
            )
        share = divide_config(config, shard.size)
        with torch.device("meta"):
            language_model = transformers.AutoModelForCausalLM.from_config(share, dtype=dtype)
        base = language_model.get_decoder()
        for layer in base.layers:
            for part, name in ((layer.self_attn, "o_proj"), (layer.mlp, "down_proj")):
                setattr(part, name, RowShardedLinear(getattr(part, name), shard))
        _read_share(language_model, folder, shard, device)
        base.rotary_emb = type(base.rotary_emb)(config=share).to(device)  # computed, in no file
        if (folder / "generation_config.json").is_file():
            language_model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
        made = cls(language_model.eval().requires_grad_(False), device=device, owns_weights=True)
        made.shard = shard
        return made


class RowShardedLinear(nn.Linear):
    """A linear layer of which this rank has some input columns; results are added up over the ranks.

    Args:
        whole: what it stands for, on the meta device; the first rank alone adds its bias.
        shard: this rank.
    """

    def __init__(self, whole: nn.Linear, shard: Shard) -> None:
        has_bias = whole.bias is not None and shard.rank == 0
        super().__init__(
            whole.in_features, whole.out_features, has_bias, device=whole.weight.device, dtype=whole.weight.dtype
        )
        self.all_reduce = shard.all_reduce

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        partial_sum = linear(values, self.weight, self.bias)
        self.all_reduce(partial_sum)
        return partial_sum


def divide_config(config: transformers.PretrainedConfig, size: int) -> Any:
    """The configuration of one rank's share: as that of a smaller model with the same residual stream.

    Raises:
        ConfigError: a size that is shared out is no multiple of `size`.
    """
    share = copy.deepcopy(config)
    share.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in _SHARED_OUT:
        value = getattr(config, name)
        if value % size:
            raise ConfigError(f"tensor_parallel_size {size} does not divide the model's {name}, {value}")
        setattr(share, name, value // size)
    return share


def _read_share(model: nn.Module, folder: Path, shard: Shard, device: torch.device) -> None:
    """Puts this rank's part of each tensor in the place of the model's parameters on the meta device."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    is_tied = bool(model.config.tie_word_embeddings)  # type: ignore[union-attr]
    with ExitStack() as opened:
        places: dict[str, Any] = {}
        try:
            for path in sorted(folder.glob("*.safetensors")):
                file = opened.enter_context(safe_open(path, framework="pt", device="cpu"))
                places |= dict.fromkeys(file.keys(), file)
            for name, parameter in [*model.named_parameters()]:
                owner_name, _, leaf = name.rpartition(".")
                owner = model.get_submodule(owner_name)
                if owner is head and is_tied:
                    continue
                if name not in places:
                    raise ModelError(f"model {str(folder)!r}: its files lack the weight {name}")
                tensor = _cut(places[name].get_slice(name), parameter.shape, shard)
                setattr(owner, leaf, nn.Parameter(tensor.to(device, parameter.dtype), requires_grad=False))
        except ModelError:
            raise
        except Exception as error:  # safetensors raises its own kinds for a damaged file
            raise ModelError(f"model {str(folder)!r}: the weights cannot be read: {error}") from error
    if is_tied:
        head.weight = embedding.weight


def _cut(whole: Any, shape: torch.Size, shard: Shard) -> torch.Tensor:
    """The rank's part of a tensor in a file: along the dimension, if any, in which its share is smaller."""
    sizes = whole.get_shape()
    if any(size not in (part, part * shard.size) for size, part in zip(sizes, shape, strict=True)):
        raise ModelError(f"a weight of shape {sizes}, expected {shard.size} times {list(shape)}")
    ranges = (
        slice(0, part) if size == part else slice(shard.rank * part, (shard.rank + 1) * part)
        for size, part in zip(sizes, shape, strict=True)
    )
    tensor: torch.Tensor = whole[tuple(ranges)]
    return tensor.contiguous()
