"""Configs of decoder families."""

from typing import Any

import transformers
from transformers import PretrainedConfig

PHI4_MINI = {
    "partial_rotary_factor": 0.75,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "hidden_size": 3072,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + i / 10 for i in range(48)],
        "long_factor": [1.0 + i for i in range(48)],
        "original_max_position_embeddings": 4096,
    },
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 8}),
    "llama, biases": ("Llama", {"num_key_value_heads": 8, "attention_bias": True, "mlp_bias": True}),
    "llama, dynamic angles": (
        "Llama",
        {"num_key_value_heads": 8, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "mistral, a window": ("Mistral", {"sliding_window": 4096, "max_position_embeddings": 32768}),
    "ministral": (
        "Ministral",
        {"head_dim": 128, "layer_types": ["full_attention", "sliding_attention"] * 16, "sliding_window": 4096},
    ),
    "mixtral": ("Mixtral", {"head_dim": 128}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 4, "num_attention_heads": 28, "hidden_size": 3584}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 8}),
    "qwen2_moe": ("Qwen2Moe", {}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 64}),
    "olmoe": ("Olmoe", {"num_key_value_heads": 8}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", {}),
    "gemma3_text": ("Gemma3Text", {"head_dim": 128}),
    "gpt_oss": ("GptOss", {}),
    "phi": ("Phi", {}),
    "phi3": ("Phi3", {"sliding_window": 2047}),
    "phi4-mini": ("Phi3", PHI4_MINI),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"max_position_embeddings": 8192}),
    "granite": ("Granite", {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}),
    "granitemoe": ("GraniteMoe", {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "num_local_experts": 40}),
    "smollm3": ("SmolLM3", {"head_dim": 64}),
    "starcoder2": ("Starcoder2", {"sliding_window": 2048, "hidden_size": 768, "num_attention_heads": 12}),
    "cohere": ("Cohere", {}),
    "cohere2": ("Cohere2", {}),
    "glm4": ("Glm4", {}),
    "glm4_moe": ("Glm4Moe", {"head_dim": 64, "first_k_dense_replace": 1}),
    "exaone4": ("Exaone4", {"max_position_embeddings": 8192, "sliding_window": 4096}),
    "ernie4_5": ("Ernie4_5", {}),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {"head_dim": 64}),
    "seed_oss": ("SeedOss", {"num_attention_heads": 16}),
}
"""Configs as released models have them, or as their classes give them; `shrink` makes them small."""


def make_config(name: str) -> PretrainedConfig:
    kind, values = FAMILIES[name]
    config: PretrainedConfig = getattr(transformers, f"{kind}Config")(**values)
    return config
