"""Prompt lookup (`engine.scheduling.prompt_lookup`) with the costs of a loaded model on its device."""

import torch

from engine.execution.output import TokenSampler
from engine.model.model import Model
from engine.scheduling.prompt_lookup import PromptLookup


def make_lookup(model: Model, sampler: TokenSampler) -> PromptLookup:
    """The prompt lookup of one run, whose tokens `sampler` chooses. See `PromptLookup`."""
    return PromptLookup(
        num_weight_rows=_num_weight_rows(model),
        num_weight_kv_tokens=model.weight_bytes / model.kv_shape.bytes_per_token,
        count_allowed=sampler.count_allowed,
    )


def _num_weight_rows(model: Model) -> int:
    """Rows that a step computes in the time in which it reads the model's weights; measured for AMX tiles."""
    if model.device.type != "cpu":
        return 256
    return 64 if model.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() else 16
