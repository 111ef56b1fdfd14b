"""Weight files that do not belong to their config.json are refused by name: shapes, biases, heads, adapters."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    PretrainedConfig,
    Qwen2Config,
)

from engine import Engine, EngineConfig, Request
from engine.errors import ConfigError, ModelError
from engine.limits import check_weights
from engine.model.loading.checkpoint import read_json, resolve_checkpoint
from engine.model.model_shape import ModelShape
from tests.adapters import save_adapter

SETTINGS = EngineConfig(dtype="float32", device="cpu", kv_memory_bytes=1 << 22)
SIZES: dict[str, Any] = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
Q_PROJ = "model.layers.1.self_attn.q_proj"


def write(folder: Path, config: PretrainedConfig, **tensors: torch.Tensor) -> Path:
    """A checkpoint with random weights and `tensors` of `Q_PROJ`."""
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    found = load_file(folder / "model.safetensors") | {f"{Q_PROJ}.{kind}": each for kind, each in tensors.items()}
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({"weight": torch.zeros(32, 64)}, rf"the weight {Q_PROJ}\.weight has the shape \[32, 64\], by config"),
        ({"bias": torch.ones(64)}, rf"its files have {Q_PROJ}\.bias, its configuration says nothing of it"),
    ],
)
def test_a_weight_of_another_shape_and_a_bias_without_a_place_are_named(
    tensors: dict[str, torch.Tensor], why: str, tmp_path: Path
) -> None:
    """transformers refuses the first without a name, and leaves out the second."""
    config = Olmo2Config(**SIZES, num_attention_heads=4, num_key_value_heads=2)
    with pytest.raises(ModelError, match=why):
        Engine.load(write(tmp_path / "model", config, **tensors), SETTINGS)


@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv", "scales"])
def test_weights_of_8_bits_that_config_json_does_not_mention_are_refused(scale: str, tmp_path: Path) -> None:
    """As modelopt saves them: transformers converts the codes and leaves out the scales."""
    codes = {"weight": torch.ones(64, 64).to(torch.float8_e4m3fn), scale: torch.tensor(0.5)}
    folder = write(tmp_path, Olmo2Config(**SIZES, num_attention_heads=4), **codes)
    with pytest.raises(ModelError, match=rf"its files have {Q_PROJ}\.{scale}, as of quantized weights; config"):
        Engine.load(folder, SETTINGS)


@pytest.mark.parametrize("unread", ["self_attn.o_proj.bias", "self_attn.q_norm.weight", "pre_attention_norm.weight"])
@pytest.mark.parametrize("prefix", ["model.", ""])
@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, GraniteConfig])
def test_a_bias_or_a_norm_that_would_not_be_read_is_named(
    kind: type[PretrainedConfig], prefix: str, unread: str, tmp_path: Path
) -> None:
    """As of a model that was derived from the architecture which config.json names."""
    folder = write(tmp_path, kind(**SIZES, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True))
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    not_needed = {f"{prefix}layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "score.bias": torch.ones(2)}
    save_file(tensors | not_needed, folder / "model.safetensors", metadata={"format": "pt"})
    Engine.load(folder, SETTINGS)
    name = f"{prefix}layers.1.{unread}"
    save_file(tensors | {name: torch.ones(64)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"its files have {name}, its configuration says nothing of it"):
        Engine.load(folder, SETTINGS)


@pytest.mark.parametrize(("kind", "num_kv_heads"), [(LlamaConfig, 64), (MistralConfig, 8), (Qwen2Config, 32)])
def test_kv_heads_that_config_json_leaves_out_are_those_of_the_architecture_s_class(
    kind: type[PretrainedConfig], num_kv_heads: int, tmp_path: Path
) -> None:
    folder = write(tmp_path, kind(**SIZES, num_attention_heads=64))
    values = read_json(folder / "config.json")
    del values["num_key_value_heads"]
    (folder / "config.json").write_text(json.dumps(values))
    check_weights(SETTINGS, folder)
    assert ModelShape.from_config(values, dtype="float32").num_kv_heads == num_kv_heads


def test_heads_that_cannot_share_kv_heads_are_refused(tmp_path: Path) -> None:
    """Before any work, and by the kernels, which would divide by zero."""
    folder = write(tmp_path / "model", LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=3))
    for check in (lambda: check_weights(SETTINGS, folder), lambda: Engine.load(folder, SETTINGS)):
        with pytest.raises(ModelError, match=r"config\.json: 4 heads are no multiple of its KV heads"):
            check()
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ConfigError, match=r"attention 'native': 1\.33333 query heads a KV head are no whole number"):
        Engine.load(loaded, replace(SETTINGS, attention="native"))


def test_the_folder_of_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(ModelError, match=r"the folder holds no \*\.safetensors file of a model"):
        resolve_checkpoint(tmp_path)


def test_an_adapter_beside_a_model_is_not_applied(tmp_path: Path) -> None:
    """transformers applies it where peft is installed."""
    folder = write(tmp_path, Olmo2Config(**SIZES, num_attention_heads=4, num_key_value_heads=2))
    asked = Request(request_id=0, token_ids=[5, 6, 7], mode="score", labels=((8,), (9,)))
    expected = Engine.load(folder, SETTINGS).score([asked])
    save_adapter(folder, folder)
    assert Engine.load(folder, SETTINGS).score([asked])[0].label_logprobs == expected[0].label_logprobs
