"""Models that are not plain: loading, which are refused, how logits are finished."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.errors import ModelError
from engine.model.families.family import find_family
from engine.model.loading.stock_weights import convert_weights, load_weights, read_config
from engine.model.longest_sequence import longest_sequence
from engine.model.model import Model

LOGGER = logging.getLogger("batchloom.engine")

_STATE_LAYERS = ("linear", "mamba", "conv", "recurrent", "ssm", "rwkv", "lightning")
_STATE_KEYS = ("mamba_d_state", "ssm_cfg", "state_size", "linear_num_value_heads", "conv_L_cache", "time_step_rank")
_STATES = "layers of linear attention, convolution or state spaces keep a state in place of KV"
_BLOCKS = "which KV blocks do not hold"
_CROSS = "(cross attention), and KV is kept for prompts alone"
_REFUSED = {
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention"), f"its decoder attends to an encoder {_CROSS}"),
    "cross_attention_layers": f"its decoder attends to images {_CROSS}",
    "kv_lora_rank": f"its keys and values are projections of one small vector a token (MLA), {_BLOCKS}",
    **dict.fromkeys(_STATE_KEYS, _STATES),
    "num_kv_shared_layers": "some of its layers read the KV of others",
    "attention_chunk_size": "some of its layers attend within chunks of the context",
    "alibi": "positions are added to its attention scores (ALiBi)",
}
"""Settings that, where they are set, say what the engine does not support."""


def refuse_known(config: Any) -> None:
    """Raises `ModelError` for text models whose attention or state, by their config, the engine does not support."""
    reasons = [reason for name, reason in _REFUSED.items() if getattr(config, name, None)]
    layer_types = [str(kind) for kind in getattr(config, "layer_types", None) or ()]
    if any(word in kind for kind in layer_types for word in _STATE_LAYERS):
        reasons.append(_STATES)
    if getattr(config, "is_causal", None) is False:
        reasons.append(
            "its attention is not causal, by is_causal of config.json, and KV is kept of earlier tokens alone"
        )
    if reasons:
        raise ModelError(f"architecture {config.model_type!r} is not supported: {reasons[0]}")


def load_stock(
    source: Path | PreTrainedModel, *, dtype: torch.dtype, device: torch.device
) -> tuple[PreTrainedModel, bool]:
    """A model of transformers on a device, and whether it has an output layer. Raises `ModelError` as `load_weights`.

    Args:
        source: the checkpoint's folder, or a loaded model, which is moved.
    """
    if isinstance(source, Path):
        return load_weights(source, read_config(source), dtype=dtype, device=device)
    convert_weights(source, dtype, "a loaded model must not be quantized")
    return source.to(device=device).eval(), True


def adapt(model: Model, language_model: PreTrainedModel) -> None:
    """Sets the attributes of `model`, in its constructor, that depend on the family of `language_model`. Raises
    `ModelError` if config.json has no max_position_embeddings."""
    config = language_model.config.get_text_config(decoder=True)
    model.max_positions, model.finish_logits = longest_sequence(config), find_logit_rule(config)
    if model.max_positions < config.max_position_embeddings:
        LOGGER.info(
            "sequences end at %d tokens, where longrope changes its angles: a longer one would change the answers of "
            "its whole batch; config.json says %d",
            model.max_positions,
            config.max_position_embeddings,
        )
    set_experts(language_model, model.device)
    if family := find_family(language_model, model.device, model.kv_shape.dtype):
        model.read_layer, model.join_layers = family.read_weights, family.join_layers


def set_experts(language_model: PreTrainedModel, device: torch.device) -> None:
    """Chooses how transformers' layers compute experts, if there are any. On a GPU each product of all experts is one
    grouped product: loops over experts wait for the device to learn which ones were chosen. Grouped products take rows
    of multiples of 16 bytes; experts of other sizes are computed in a loop."""
    experts = [module for module in language_model.modules() if hasattr(module, "is_concatenated")]
    weights = [weight for module in experts for weight in module.parameters() if weight.ndim == 3]
    if any(size * weight.itemsize % 16 for weight in weights for size in weight.shape[1:]):
        language_model.set_experts_implementation("eager")
    elif experts and device.type == "cuda":
        language_model.set_experts_implementation("grouped_mm")


def find_logit_rule(config: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The function that a family applies to its logits; None: none. By the text model's config, Granite divides by
    `logits_scaling`, Cohere multiplies by `logit_scale`, Gemma caps at `final_logit_softcapping`."""
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    cap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
    if scale == 1.0 and not cap:
        return None

    def finish(logits: torch.Tensor) -> torch.Tensor:
        scaled = logits * scale
        return cap * torch.tanh(scaled / cap) if cap else scaled

    return finish
