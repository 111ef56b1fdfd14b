"""Sizes of a model by its config.json: a KV budget that holds no request is found without weights."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import EngineConfig
from engine.errors import CapacityError, ModelError
from engine.limits import check_kv_budget
from engine.model.loading.checkpoint import read_json
from engine.model.model_shape import ModelShape

BLOCK_BYTES = 8 * 2 * 2 * 2 * 16 * 4
"""Of 8 tokens of the tiny Llama: key and value, two layers, two KV heads of 16 dimensions, float32."""


def config(budget: Any, **settings: Any) -> EngineConfig:
    return EngineConfig(kv_memory_bytes=budget, block_size=8, device="cpu", **settings)


def test_a_budget_below_one_request_is_refused(tiny_llama: Path) -> None:
    for budget in (1000, 2 * BLOCK_BYTES - 1):
        with pytest.raises(
            CapacityError,
            match=f"a KV budget of {budget} bytes holds no request: one block of 8 tokens needs {BLOCK_BYTES} bytes",
        ):
            check_kv_budget(config(budget, dtype="float32"), tiny_llama)
    check_kv_budget(config(2 * BLOCK_BYTES, dtype="float32"), tiny_llama)
    check_kv_budget(config(BLOCK_BYTES, dtype="bfloat16"), tiny_llama)
    check_kv_budget(config("auto"), tiny_llama)
    check_kv_budget(config(2 * BLOCK_BYTES), tiny_llama)
    with pytest.raises(CapacityError, match="holds no request"):
        check_kv_budget(config(1000), tiny_llama)


def test_a_checkpoint_without_sizes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        check_kv_budget(config(1000), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    with pytest.raises(ModelError, match="num_attention_heads must be a positive whole number"):
        check_kv_budget(config(1000), tmp_path)


def test_sizes_of_other_names_are_found_by_the_architecture_s_class(tmp_path: Path) -> None:
    """GPT-2 says n_embd, n_head and n_layer; a Gemma 3 says sizes of its text model that differ from the defaults."""
    values = {"model_type": "gpt2", "n_embd": 48, "n_head": 3, "n_layer": 5, "n_positions": 64, "vocab_size": 99}
    (tmp_path / "config.json").write_text(json.dumps(values))
    block_bytes = 8 * 2 * 5 * 48 * 4
    check_kv_budget(config(2 * block_bytes, dtype="float32"), tmp_path)
    with pytest.raises(CapacityError, match=f"one block of 8 tokens needs {block_bytes} bytes"):
        check_kv_budget(config(2 * block_bytes - 1, dtype="float32"), tmp_path)
    shape = ModelShape.from_config(values, dtype="float32")
    assert (shape.num_layers, shape.hidden_size, shape.num_kv_heads, shape.head_dim) == (5, 48, 3, 16)
    assert shape.num_layer_weights == 5 * 12 * 48 * 48, "four products of the attention, two of four times the width"
    text = {"num_hidden_layers": 7, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 64}
    values = {"model_type": "gemma3", "text_config": text | {"model_type": "gemma3_text", "num_attention_heads": 4}}
    shape = ModelShape.from_config(values, dtype="bfloat16")
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (7, 2, 32)
    assert shape.layers_by_window == {64: 6, 0: 1}, "five windows, then all, by the class"
    assert shape.kv_block_bytes(EngineConfig(block_size=8)) == 8 * 2 * 2 * 32 * 2


def test_a_qwen_has_windows_only_if_its_config_says_so(tiny_checkpoint: Callable[[str], Path]) -> None:
    """As by the default of its class."""
    values = read_json(tiny_checkpoint("qwen2") / "config.json") | {"sliding_window": 16}
    values["layer_types"] = ["full_attention", "sliding_attention"]
    assert ModelShape.from_config(values | {"use_sliding_window": True}, dtype="float32").windows == (0, 16)
    values.pop("use_sliding_window", None)
    assert ModelShape.from_config(values, dtype="float32").windows == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sliding_window", "16"),
        ("max_position_embeddings", [512]),
        ("max_window_layers", "1"),
        ("layer_types", 5),
        ("layer_types", ["sliding_attention"]),
        ("num_experts", "four"),
        ("num_attention_heads", 0),
    ],
)
def test_a_value_that_cannot_be_used_is_named(name: str, value: object, tiny_checkpoint: Callable[[str], Path]) -> None:
    values = read_json(tiny_checkpoint("qwen2") / "config.json") | {"sliding_window": 16, "use_sliding_window": True}
    with pytest.raises(ModelError, match=rf"config\.json: {name} must .*, got {re.escape(repr(value))}$"):
        ModelShape.from_config(values | {name: value}, dtype="float32")
