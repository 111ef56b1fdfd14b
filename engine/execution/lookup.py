"""Prompt lookup (`engine.scheduling.prompt_lookup`) as a loaded model and its device make it worth a try."""

import torch

from engine.execution.output import TokenSampler
from engine.kv.kv_cache import KVCache
from engine.model.model import Model
from engine.scheduling.prompt_lookup import PromptLookup


def make_lookup(model: Model, cache: KVCache, sampler: TokenSampler) -> PromptLookup:
    """What guesses tokens of answers in one run.

    Args:
        model: whose weights and KV each step reads.
        cache: its KV memory.
        sampler: chooses the tokens of the run.
    """
    return PromptLookup(
        num_weight_rows=_num_weight_rows(model),
        num_weight_kv_tokens=model.weight_bytes / model.kv_shape.bytes_per_token,
        block_size=cache.block_size,
        count_allowed=sampler.count_allowed,
    )


def _num_weight_rows(model: Model) -> int:
    """Rows that a step computes in the time in which it reads the model's weights; for products on tiles measured."""
    if model.device.type != "cpu":
        return 256
    return 64 if model.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() else 16
