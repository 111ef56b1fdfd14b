"""What transformers leaves out of the configuration of a GGUF file: rotations, windows, biases, sizes."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import ModelError

LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}
"""Layers of the Gemma models that scale queries by their hidden size over their heads, which no field says."""

_ENDS = frozenset(
    (
        *("<end_of_turn>", "<|end|>", "<|eot_id|>", "<|im_end|>"),  # of a turn
        *("<|endoftext|>", "<|end_of_text|>", "<|eom_id|>"),  # of a text or a message
    )
)
"""Tokens that end an answer in llama.cpp, too, whichever token a file names."""

Read = Callable[[str], Any]
"""The value of a field by its name behind the architecture's; None where the file has no such field."""


def complete_config(config: Any, reader: Any) -> None:
    """Sets what the file says and transformers' configuration lacks.

    Args:
        config: made by transformers of the same file.
        reader: of the gguf package.
    Raises:
        ModelError: the file scales rotations in a way that is not known here, has more layers than it says, or
            attention that is not causal.
    """
    architecture = reader.fields["general.architecture"].contents()

    def read(name: str) -> Any:
        field = reader.fields.get(f"{architecture}.{name}")
        return None if field is None else field.contents()

    if read("attention.causal") is False:
        raise ModelError(f"{architecture}.attention.causal is false, which is not supported")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    num_layers = config.num_hidden_layers + (read("nextn_predict_layers") or 0)
    if extra := [name for name in tensors if name.startswith("blk.") and int(name.split(".")[1]) >= num_layers]:
        raise ModelError(f"{architecture}.block_count says {config.num_hidden_layers} layers, it has {min(extra)}")
    if (experts := tensors.get("blk.0.ffn_gate_exps.weight")) is not None:
        config.moe_intermediate_size = int(experts.shape[1])
    if (expert := tensors.get("blk.0.ffn_up_shexp.weight")) is not None:
        config.shared_expert_intermediate_size = int(expert.shape[1])
    if read("attention.head_count_kv") is None and hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = config.num_attention_heads
    if config.model_type == "qwen3":
        config.head_dim = read("attention.key_length") or config.head_dim
    for key, name in (("attention_bias", "attn_q"), ("mlp_bias", "ffn_down")):
        if hasattr(config, key) and f"blk.0.{name}.bias" in tensors:
            setattr(config, key, True)
    factors = {name: np.array(tensor.data) for name, tensor in tensors.items() if name.startswith("rope_f")}
    rope = getattr(config, "rope_parameters", None) or {}
    is_by_layer = any(isinstance(each, dict) for each in rope.values())
    own = rope.get("full_attention", {}) if is_by_layer else rope  # scaling is for layers that see all
    if (base := read("rope.freq_base")) is not None:
        own["rope_theta"] = float(base)
    if is_by_layer and (base := read("rope.freq_base_swa")) is not None:
        rope["sliding_attention"]["rope_theta"] = float(base)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_rotated = read("rope.dimension_count") or head_dim
    if config.model_type == "phi3" and num_rotated < head_dim:
        own["partial_rotary_factor"] = num_rotated / head_dim
    own |= _find_scaling(read, factors, float(own.get("rope_theta", 1e4)), num_rotated)
    config.rope_parameters = rope
    if own.get("rope_type") == "longrope":
        config.original_max_position_embeddings = own["original_max_position_embeddings"]
    if (window := read("attention.sliding_window")) is not None and hasattr(config, "sliding_window"):
        config.sliding_window = int(window) or None  # Phi-4's is 0
    if config.num_hidden_layers == LAYERS_OF_27B.get(config.model_type):
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads


def find_pooling(reader: Any) -> str | None:
    """The pooling of an embedding model by sentence-transformers' name; None where the file names none, or the last
    token's. `reader`: of the gguf package."""
    field = reader.fields.get(f"{reader.fields['general.architecture'].contents()}.pooling_type")
    return None if field is None else {1: "mean", 2: "cls"}.get(int(field.contents()))


def find_end_tokens(reader: Any) -> list[int]:
    """Tokens that end an answer: the one that the file names, and those that end a turn or a text, of which a file may
    name only the other. `reader`: of the gguf package."""
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    ends = _ENDS - ({"<|end|>"} if "<|return|>" in tokens else set())  # gpt-oss ends its thoughts with it
    named = [reader.fields.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot")]
    found = {int(field.contents()) for field in named if field is not None}
    return sorted(found | {token_id for token_id, token in enumerate(tokens) if token in ends})


def _find_scaling(
    read: Read, factors: Mapping[str, npt.NDArray[Any]], theta: float, num_rotated: int
) -> dict[str, Any]:
    """The keys of transformers' ``rope_parameters`` that scale rotations; none where the file scales nothing."""
    kind = read("rope.scaling.type") or ("none" if read("rope.scale_linear") is None else "linear")
    original, attention_factor = read("rope.scaling.original_context_length"), read("rope.scaling.attn_factor")
    found: dict[str, Any] = {} if original is None else {"original_max_position_embeddings": int(original)}
    if "rope_factors_short.weight" in factors:
        short, long = (factors[f"rope_factors_{which}.weight"].tolist() for which in ("short", "long"))
        if attention_factor is not None:
            found["attention_factor"] = float(attention_factor)
        return found | {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    if "rope_freqs.weight" in factors:
        return _find_llama3(factors["rope_freqs.weight"], theta, num_rotated)
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise ModelError(f"rope.scaling.type {kind!r} is not known")
    factor = float(read("rope.scaling.factor") or read("rope.scale_linear") or 1)
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    if attention_factor is not None:
        found["attention_factor"] = float(attention_factor) * (0.1 * math.log(factor) + 1)
    return found | {"rope_type": kind, "factor": factor}


def _find_llama3(factors: npt.NDArray[np.float32], theta: float, num_rotated: int) -> dict[str, Any]:
    """The scaling of Llama 3.1 and later, of which a file has the divisors of the frequencies, float32 ``[n]``."""
    if (factors == 1).all():
        return {}
    found = {"factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    original = 8192
    wave_lengths = 2 * math.pi * theta ** (np.arange(0, num_rotated, 2) / num_rotated)
    smooth = ((original / wave_lengths - 1) / (4 - 1)).clip(0, 1)
    if len(factors) != len(smooth) or not np.allclose(
        factors, 1 / ((1 - smooth) / found["factor"] + smooth), rtol=1e-3
    ):
        raise ModelError("rope_freqs.weight has factors that are not those of rope_type 'llama3'")
    return found | {"rope_type": "llama3", "original_max_position_embeddings": original}
