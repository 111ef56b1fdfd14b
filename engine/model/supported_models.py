"""Which checkpoints are computed exactly; others are refused by name."""

import transformers

from engine.errors import ModelError

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Each is held to transformers' own `generate` by tests/parity."""


def check_supported(config: transformers.PretrainedConfig) -> None:
    """Refuses by name what has not been proven exact.

    Raises:
        ModelError: the architecture, a sliding window, logit soft-capping, or a changing rotary base.
    """
    name = config.model_type
    if name not in SUPPORTED_MODEL_TYPES:
        raise ModelError(f"architecture {name!r} is not supported; supported: {', '.join(SUPPORTED_MODEL_TYPES)}")
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    slides = window is not None and (name == "mistral" or "sliding_attention" in layer_types)
    if slides and window < config.max_position_embeddings:
        raise ModelError(
            f"architecture {name!r} with sliding_window={window} below its context of "
            f"{config.max_position_embeddings} tokens is not supported"
        )
    if layer_types - {"full_attention", "sliding_attention"}:
        raise ModelError(f"architecture {name!r}: layer types {sorted(layer_types)} are not supported")
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, cap, None):
            raise ModelError(f"architecture {name!r} with {cap}={getattr(config, cap)} is not supported")
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type in ("dynamic", "longrope"):
        raise ModelError(f"rotary embedding of type {rope_type!r} depends on the batch and is not supported")
