"""The names of tensors in GGUF files."""

from collections.abc import Mapping
from typing import TypeVar

Sizes = TypeVar("Sizes")

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
"""Modules of a layer: transformers' names, and those in GGUF files."""

NAMES_OF_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(module: str, names: Mapping[str, str] = NAMES) -> str:
    """The name in GGUF files of a module, as "layers.3.mlp.up_proj", "norm" or "lm_head"; `names`: of the modules of a
    layer."""
    if module.startswith("layers."):
        _, index, name = module.split(".", 2)
        return f"blk.{index}.{names[name]}"
    return {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[module]


def rename(weights: Mapping[str, Sizes]) -> dict[str, Sizes]:
    """What is said of a plain model's weights, as "layers.3.mlp.up_proj.weight", by their names in GGUF files."""
    parts = {name: name.rpartition(".") for name in weights}
    return {f"{gguf_name(module)}.{kind}": weights[name] for name, (module, _, kind) in parts.items()}
