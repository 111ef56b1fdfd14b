"""The number of tokens in a step where max_num_batched_tokens is "auto": a multiple of the roofline's knee."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.device.free_memory import free_memory_bytes
from engine.device.placement import dtype_name
from engine.errors import ModelError
from engine.model.model_shape import ModelShape
from engine.simulation.device import Device, match_device

if TYPE_CHECKING:
    import torch

    from engine.model.shard import Shard

LOGGER = logging.getLogger("batchloom.engine")

LEAST_GPU_TOKENS = 8192
"""Fewest tokens of a GPU's step, where its memory allows."""

KNEES = 32
"""At the knee, computing a step takes as long as reading the weights. At 32 times that, reading them is 3 % of it."""

STEP_SHARE = 1 / 16
"""Share of the memory beside the weights that a step may take for activations. The rest is for KV."""


def resolve_on_gpu(
    config: EngineConfig,
    settings: Mapping[str, Any],
    device: "torch.device",
    dtype: "torch.dtype",
    shard: "Shard | None" = None,
) -> EngineConfig:
    """As `resolve_step_tokens`, for this machine's GPU after the weights are loaded.

    Args:
        settings, dtype: of the model's config.json, and of the weights.
        shard: the rank of a sharded model; all ranks agree on one number of tokens.
    """
    import torch

    properties = torch.cuda.get_device_properties(device)
    try:
        shape = ModelShape.from_config(settings, dtype=dtype_name(dtype))
    except ModelError:  # an architecture whose sizes have other names
        shape = None
    rates = match_device(properties.name, properties.total_memory)
    free_bytes = free_memory_bytes(device)
    if config.dtype == "fp8" and shape is not None:  # the layers are on the host until they are converted
        free_bytes = max(0, free_bytes - ModelShape.from_config(settings, dtype="fp8").weight_bytes)
    config = resolve_step_tokens(config, rates, shape, free_bytes)
    if shard is not None:
        config = replace(config, max_num_batched_tokens=shard.agree(config.step_tokens))
    LOGGER.info("max_num_batched_tokens is %s on %s", config.max_num_batched_tokens, properties.name)
    return config


def resolve_step_tokens(
    config: EngineConfig, device: Device | None, shape: ModelShape | None, free_bytes: int
) -> EngineConfig:
    """The settings with a number in place of "auto", for an engine on a GPU; a number stays as it is.

    Args:
        device, shape: its rates and the model's sizes; None where they are not known.
        free_bytes: free memory of the GPU after the weights are loaded.
    """
    if config.max_num_batched_tokens != "auto":
        return config
    num_tokens = LEAST_GPU_TOKENS
    while device is not None and shape is not None and num_tokens < KNEES * knee_tokens(device, shape):
        num_tokens *= 2
    if shape is not None:
        while num_tokens > config.step_tokens and num_tokens * row_bytes(shape) > STEP_SHARE * free_bytes:
            num_tokens //= 2
    return replace(config, max_num_batched_tokens=num_tokens)


def knee_tokens(device: Device, shape: ModelShape) -> float:
    """Rows that a product computes in the time in which it reads its weights, at the device's peaks."""
    peak_flops = device.peak_flops["float32" if shape.value_bytes == 4 else "bfloat16"]
    return peak_flops / device.peak_bytes_per_second * shape.value_bytes / 2


def row_bytes(shape: ModelShape) -> int:
    """Bytes of one row while a layer is computed: its activations, and two float32 partial results of attention."""
    heads = shape.head_dim * (2 * shape.num_q_heads + 2 * shape.num_kv_heads)
    activations = 4 * shape.hidden_size + heads + 3 * shape.intermediate_size * shape.num_active_experts
    return activations * max(2, shape.value_bytes) + 2 * shape.num_q_heads * (shape.head_dim + 1) * 4
