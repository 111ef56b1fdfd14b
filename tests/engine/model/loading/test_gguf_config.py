"""What a GGUF file says about rotations, windows and the scale of queries, in transformers' configuration."""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.errors import ModelError
from engine.model.loading.gguf_config import complete_config, find_end_tokens

HALF = 32
"""Frequencies of a head of 64."""


def complete(file: Path, architecture: str, *, rope: dict[str, Any] | None = None, **tensors: Any) -> Any:
    """A configuration after a file with these fields and tensors was read; names of `rope` lack the architecture's."""
    kind = {"gemma3": "gemma3_text", "qwen2moe": "qwen2_moe"}.get(architecture, architecture)
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(kind, **sizes, **({} if kind in ("phi3", "starcoder2") else {"head_dim": 64}))
    writer = GGUFWriter(file, architecture)
    for name, value in (rope or {}).items():
        kinds = {str: gguf.GGUFValueType.STRING, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
        writer.add_key_value(f"{architecture}.{name}", value, kinds[type(value)])
    writer.add_tensor("output_norm.weight", np.ones(256, np.float32))
    for name, values in tensors.items():
        writer.add_tensor(name if name.endswith(".bias") else f"{name}.weight", np.asarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    complete_config(config, GGUFReader(file))
    return config


def llama3_factors(factor: float, theta: float) -> np.ndarray:
    """As the converter of llama.cpp writes them."""
    found = []
    for index in range(HALF):
        wave_length = 2 * math.pi * theta ** (index / HALF)
        if wave_length < 8192 / 4:
            found.append(1.0)
        elif wave_length > 8192:
            found.append(factor)
        else:
            smooth = (8192 / wave_length - 1) / 3
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_frequencies_of_llama_3(tmp_path: Path, factor: float) -> None:
    divisors = llama3_factors(factor, 5e5)
    plain = complete(tmp_path / "plain.gguf", "llama", rope={"rope.freq_base": 5e5}, rope_freqs=np.ones(HALF))
    assert plain.rope_parameters["rope_type"] == "default"
    config = complete(tmp_path / "model.gguf", "llama", rope={"rope.freq_base": 5e5}, rope_freqs=divisors)
    assert config.rope_parameters["rope_type"] == "llama3"
    expected = LlamaRotaryEmbedding(plain).inv_freq / torch.from_numpy(divisors)
    assert torch.allclose(LlamaRotaryEmbedding(config).inv_freq, expected, rtol=1e-4)


def test_other_frequencies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^rope_freqs\.weight has factors that are not those of rope_type 'llama3'$"):
        complete(tmp_path / "model.gguf", "llama", rope_freqs=np.linspace(1, 8, HALF))
    with pytest.raises(ModelError, match=r"^rope\.scaling\.type 'su' is not known$"):
        complete(tmp_path / "other.gguf", "llama", rope={"rope.scaling.type": "su"})


def test_linear_scaling(tmp_path: Path) -> None:
    scaling = {"rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    config = complete(tmp_path / "model.gguf", "gemma3", rope=scaling)
    assert config.rope_parameters["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    assert config.rope_parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}
    config = complete(tmp_path / "other.gguf", "llama", rope={"rope.scaling.type": "linear"})
    assert config.rope_parameters["factor"] == 1, "as llama.cpp reads a file that says none"


def test_yarn(tmp_path: Path) -> None:
    scaling = {"rope.freq_base": 1e6, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    config = complete(tmp_path / "a.gguf", "qwen2", rope=scaling | {"rope.scaling.original_context_length": 32768})
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}
    assert config.rope_parameters == expected


def test_phi(tmp_path: Path) -> None:
    config = complete(
        tmp_path / "model.gguf",
        "phi3",
        rope={
            "rope.dimension_count": 48,
            "rope.scaling.original_context_length": 4096,
            "rope.scaling.attn_factor": 1.19,
            "attention.sliding_window": 2047,
        },
        rope_factors_short=np.ones(24),
        rope_factors_long=np.full(24, 3.0),
    )
    rope = config.rope_parameters
    assert (rope["rope_type"], rope["partial_rotary_factor"], config.sliding_window) == ("longrope", 0.75, 2047)
    assert (rope["short_factor"], rope["long_factor"]) == ([1.0] * 24, [3.0] * 24)
    assert rope["original_max_position_embeddings"] == config.original_max_position_embeddings == 4096
    assert rope["attention_factor"] == pytest.approx(1.19)


def test_a_window_of_zero_is_none(tmp_path: Path) -> None:
    """As the converter of llama.cpp writes it for Phi-4."""
    assert complete(tmp_path / "model.gguf", "phi3", rope={"attention.sliding_window": 0}).sliding_window is None


def test_biases_are_those_of_the_file(tmp_path: Path) -> None:
    biases = {"blk.0.attn_q.bias": np.ones(256), "blk.0.ffn_down.bias": np.ones(256)}
    config = complete(tmp_path / "model.gguf", "llama", **biases)
    assert (config.attention_bias, config.mlp_bias) == (True, True)
    config = complete(tmp_path / "other.gguf", "llama")
    assert (config.attention_bias, config.mlp_bias) == (False, False)


def test_sizes_of_heads_and_of_a_shared_expert(tmp_path: Path) -> None:
    assert complete(tmp_path / "a.gguf", "qwen3", rope={"attention.key_length": 96}).head_dim == 96
    assert complete(tmp_path / "b.gguf", "qwen3").head_dim == 64
    config = complete(tmp_path / "c.gguf", "qwen2moe", **{"blk.0.ffn_up_shexp": np.ones((160, 256))})
    assert config.shared_expert_intermediate_size == 160


def test_starcoder(tmp_path: Path) -> None:
    assert (
        complete(tmp_path / "a.gguf", "starcoder2", rope={"rope.freq_base": 1e6}).rope_parameters["rope_theta"] == 1e6
    )


@pytest.mark.parametrize(("architecture", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_scales_queries_by_its_hidden_size(
    tmp_path: Path, architecture: str, num_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert complete(tmp_path / "small.gguf", architecture).query_pre_attn_scalar == 256
    make = AutoConfig.for_model
    monkeypatch.setattr(
        AutoConfig, "for_model", lambda *names, **sizes: make(*names, num_hidden_layers=num_layers, **sizes)
    )
    assert complete(tmp_path / "large.gguf", architecture).query_pre_attn_scalar == 64


@pytest.mark.parametrize(
    ("tokens", "named", "ends"),
    [
        (["a", "<eos>", "<end_of_turn>"], {"eos": 1}, [1, 2]),  # Gemma
        (["<|endoftext|>", "a", "<|end|>"], {"eos": 0}, [0, 2]),  # Phi
        (["<|end|>", "<|return|>"], {"eos": 1}, [1]),  # gpt-oss
        (["<|endoftext|>", "a", "<|im_end|>"], {"eos": 2}, [0, 2]),  # Qwen
        (["a", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], {"eos": 3}, [1, 2, 3]),  # Llama 3.1
        (["</s>", "a", "[end]"], {"eos": 0, "eot": 2}, [0, 2]),
        (["a"], {}, []),
    ],
)
def test_the_end_of_a_turn_or_a_text_ends_an_answer(
    tokens: list[str], named: dict[str, int], ends: list[int], tmp_path: Path
) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_token_list(tokens)
    for name, token in named.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert find_end_tokens(GGUFReader(tmp_path / "model.gguf")) == ends
