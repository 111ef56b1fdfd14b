"""A KV budget that holds no request is found without weights."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine import EngineConfig
from engine.errors import CapacityError, ModelError
from engine.limits import check_kv_budget

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
