"""config.json of plain models: what is read without transformers is what its classes read, or it is left to them."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ModelError
from engine.model.loading.checkpoint import PLAIN_MODEL_TYPES, find_eos_token_ids
from engine.model.model import kv_shape_of
from engine.model.plain.plain_checkpoint import empty_model, read_plain_config
from engine.model.plain.plain_model import PlainConfig, Rotation

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 3,
    "hidden_act": "silu",
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}


def check(values: dict[str, Any], folder: Path) -> PlainConfig | None:
    """What is read; where anything is, it is compared with what transformers makes of the same file."""
    (folder / "config.json").write_text(json.dumps(values))
    found = read_plain_config(folder)
    if found is None:
        return None
    expected = transformers.AutoConfig.from_pretrained(folder)
    for name, value in found.to_dict().items():
        if name == "sliding_window" and expected.model_type != "mistral":
            continue  # transformers' Qwen keeps the number of a window that it does not use
        if name not in ("head_dim", "attention_bias", "rope_parameters") or hasattr(expected, name):
            assert getattr(expected, name) in (value, None) if name == "head_dim" else getattr(expected, name) == value
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(expected)
    ours = empty_model(found, folder, torch.float32)
    assert {name: part.shape for name, part in ours.named_parameters()} == {
        name: part.shape for name, part in model.named_parameters()
    }
    rotary = type(model.model.rotary_emb)(expected)
    positions = torch.tensor([[0, 1, 17, 200, 100_000]])
    for dtype in (torch.float32, torch.bfloat16):
        at = torch.empty(1, dtype=dtype)
        for angles, others in zip(Rotation(found)(at, positions), rotary(at, positions), strict=True):
            assert torch.equal(angles, others)
    assert kv_shape_of(found, torch.float32) == kv_shape_of(expected, torch.float32)
    assert find_eos_token_ids(ours) == find_eos_token_ids(model)
    for layer, other in zip(ours.model.layers, model.model.layers, strict=True):
        assert layer.self_attn.scaling == other.self_attn.scaling
        assert layer.input_layernorm.variance_epsilon == other.input_layernorm.variance_epsilon
        has_window = getattr(other.self_attn, "sliding_window", getattr(expected, "sliding_window", None))
        assert found.sliding_window == (has_window if expected.model_type != "llama" else None)
    return found


@given(
    kind=st.sampled_from(PLAIN_MODEL_TYPES),
    rope=st.sampled_from([{}, LLAMA3, {"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}]),
    theta=st.sampled_from([None, 10_000.0, 500_000.0, 1_000_000]),
    is_new=st.booleans(),
    optional=st.fixed_dictionaries(
        {},
        optional={
            "head_dim": st.sampled_from([None, 8, 16]),
            "attention_bias": st.booleans(),
            "tie_word_embeddings": st.booleans(),
            "sliding_window": st.sampled_from([None, 64, 4096]),
            "use_sliding_window": st.booleans(),
            "max_window_layers": st.sampled_from([0, 1, 28]),
            "layer_types": st.sampled_from([["full_attention"] * 2, ["full_attention", "sliding_attention"]]),
            "eos_token_id": st.sampled_from([None, 7, [3, 5]]),
            "num_key_value_heads": st.sampled_from([1, 4]),
            "pad_token_id": st.sampled_from([None, 1]),
        },
    ),
)
def test_what_is_read_is_what_transformers_reads(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    rope: dict[str, Any],
    theta: float | None,
    is_new: bool,
    optional: dict[str, Any],
) -> None:
    theta_field = {} if theta is None else {"rope_theta": theta}
    if is_new:
        angles: dict[str, Any] = {"rope_parameters": {"rope_type": "default", **rope, **theta_field}}
    else:
        angles = {"rope_scaling": rope or None, **theta_field}
    check({"model_type": kind, **SIZES, **angles, **optional}, tmp_path_factory.mktemp("config"))


COVERED = {
    "llama": {"rope_theta": 500_000.0, "rope_scaling": LLAMA3, "mlp_bias": False, "torch_dtype": "bfloat16"},
    "mistral": {"rope_theta": 1e6, "sliding_window": None, "attention_dropout": 0.0},
    "qwen2": {"rope_theta": 1e6, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 21},
    "qwen3": {"rope_theta": 1e6, "rope_scaling": None, "head_dim": 16, "attention_bias": False},
}
"""Keys of files as they are published, beside the sizes."""


@pytest.mark.parametrize("kind", PLAIN_MODEL_TYPES)
def test_published_files_are_covered(kind: str, tmp_path: Path) -> None:
    found = check({"model_type": kind, **SIZES, **COVERED[kind]}, tmp_path)
    assert found is not None
    assert found.head_dim == (16 if kind == "qwen3" else 8)


@pytest.mark.parametrize("eos", ["2", True, 2.0, [2, "3"]], ids=repr)
def test_end_tokens_that_are_no_token_ids_are_refused(eos: object, tmp_path: Path) -> None:
    values = {"model_type": "llama", **SIZES, **COVERED["llama"], "eos_token_id": eos}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=r"config\.json: eos_token_id must be a token id or a list of them"):
        read_plain_config(tmp_path)


@pytest.mark.parametrize("kind", PLAIN_MODEL_TYPES)
@pytest.mark.parametrize(
    "change",
    [
        {"a_key_of_tomorrow": 1},
        {"quantization_config": {"quant_method": "fp8"}},
        {"hidden_act": "gelu"},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {**LLAMA3, "rope_theta": 1e4}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 1e4},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"use_sliding_window": True, "sliding_window": 16},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"model_type": "gemma2"},
        {"hidden_size": "32"},
        {"rms_norm_eps": None},
        {"rope_parameters": ["default"]},
        {"rope_parameters": {"rope_type": ["default"], "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": "1e4"}},
        {"num_attention_heads": 0},
        {"head_dim": "8"},
        {"sliding_window": "16"},
        {"layer_types": 5},
        {"layer_types": ["full_attention"]},
        {"": 1},
    ],
    ids=str,
)
def test_what_is_not_sure_is_left_to_transformers(kind: str, change: dict[str, Any], tmp_path: Path) -> None:
    values = {"model_type": kind, **SIZES, **COVERED[kind], **change}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_plain_config(tmp_path) is None


@pytest.mark.parametrize("name", [*(name for name in SIZES if name != "hidden_act"), "rope_theta"])
def test_a_size_that_is_not_named_is_left_to_transformers(name: str, tmp_path: Path) -> None:
    values = {"model_type": "llama", **SIZES, "rope_theta": 1e4}
    assert check(values, tmp_path) is not None
    del values[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_plain_config(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_a_damaged_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json (cannot be read|must hold an object, got list)"):
        read_plain_config(tmp_path)


def test_a_config_without_sizes_is_left_to_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert read_plain_config(tmp_path) is None


def test_an_end_token_of_the_generation_config_comes_first(tmp_path: Path) -> None:
    found = check({"model_type": "llama", **SIZES, "rope_theta": 1e4}, tmp_path)
    assert found is not None
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    assert find_eos_token_ids(empty_model(found, tmp_path, torch.float32)) == {8, 9}
    (tmp_path / "generation_config.json").write_text("{}")
    assert find_eos_token_ids(empty_model(found, tmp_path, torch.float32)) == {3}


def test_an_end_token_may_be_named_by_the_text_model_alone() -> None:
    """As in config.json of models of text and images."""
    config = transformers.Gemma3Config(text_config={"eos_token_id": 7})
    model = SimpleNamespace(config=config, generation_config=transformers.GenerationConfig())
    assert not hasattr(config, "eos_token_id")
    assert find_eos_token_ids(model) == {7}


def test_long_waves_are_lengthened_and_short_ones_stay(tmp_path: Path) -> None:
    found = check({"model_type": "llama", **SIZES, "head_dim": 64, "rope_theta": 1e4, "rope_scaling": LLAMA3}, tmp_path)
    assert found is not None
    plain = 1 / 1e4 ** (torch.arange(0, 64, 2) / 64)
    ratio = plain / Rotation(found).inv_freq
    assert ratio[0] == 1
    assert math.isclose(ratio[-1], 8, rel_tol=1e-6)
    assert bool((ratio[1:] >= ratio[:-1] - 1e-6).all())
