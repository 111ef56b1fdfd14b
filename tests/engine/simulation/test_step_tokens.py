"""The tokens of a step where the setting is "auto"."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model.model_shape import ModelShape
from engine.simulation import step_tokens
from engine.simulation.device import DEVICES, Device
from engine.simulation.step_tokens import resolve_step_tokens, row_bytes

AUTO = EngineConfig()
LLAMA_8B = ModelShape(
    num_layers=32, hidden_size=4096, intermediate_size=14336, num_q_heads=32, num_kv_heads=8, head_dim=128,
    vocab_size=128256, has_tied_embeddings=False, value_bytes=2,
)  # fmt: skip


def tokens_on(device: Device | None, shape: ModelShape | None, free_bytes: int) -> int:
    return resolve_step_tokens(AUTO, device, shape, free_bytes).step_tokens


def test_a_device_chooses_unless_told() -> None:
    assert (AUTO.max_num_batched_tokens, AUTO.step_tokens) == ("auto", 2048)  # of a CPU


def test_a_number_stays() -> None:
    config = EngineConfig(max_num_batched_tokens=100)
    assert resolve_step_tokens(config, DEVICES["h100"], LLAMA_8B, 1 << 40) is config


@pytest.mark.parametrize(("name", "num_tokens"), [("a100", 8192), ("h100", 16384), ("h200", 8192), ("mi300x", 8192)])
def test_a_gpu_takes_many_times_its_knee(name: str, num_tokens: int) -> None:
    """H100: 989 TFLOPS by 3.35 TB/s make a knee of 295 rows."""
    assert tokens_on(DEVICES[name], LLAMA_8B, 60 << 30) == num_tokens


def test_float32_has_its_own_knee() -> None:
    """67 TFLOPS by 3.35 TB/s: 40 rows of four bytes a weight."""
    assert tokens_on(DEVICES["h100"], replace(LLAMA_8B, value_bytes=4), 60 << 30) == 8192


def test_little_memory_makes_steps_smaller_but_no_smaller_than_on_a_cpu() -> None:
    for_steps = 16 * row_bytes(LLAMA_8B)
    assert tokens_on(DEVICES["h100"], LLAMA_8B, for_steps * 8192) == 8192
    assert tokens_on(DEVICES["h100"], LLAMA_8B, for_steps * 8192 - 1) == 4096
    assert tokens_on(DEVICES["h100"], LLAMA_8B, 0) == 2048


def test_weights_in_fp8_take_their_memory_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come to the device after the tokens of a step are chosen."""
    settings = {
        "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    }  # fmt: skip
    gpu = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 << 30)
    for_steps = 16 * row_bytes(LLAMA_8B) * 8192
    weights = ModelShape.from_config(settings, dtype="fp8").weight_bytes
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    for dtype, free_bytes, num_tokens in (
        ("bfloat16", for_steps, 8192),
        ("fp8", for_steps, 4096),
        ("fp8", for_steps + weights, 8192),
        ("fp8", 0, 2048),
    ):
        monkeypatch.setattr(step_tokens, "free_memory_bytes", lambda device, free_bytes=free_bytes: free_bytes)
        found = step_tokens.resolve_on_gpu(replace(AUTO, dtype=dtype), settings, torch.device("cuda"), torch.bfloat16)
        assert found.step_tokens == num_tokens


def test_what_no_table_knows_takes_the_least_of_a_gpu() -> None:
    assert tokens_on(None, LLAMA_8B, 60 << 30) == 8192
    assert tokens_on(DEVICES["h100"], None, 0) == 8192


def test_another_word_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="max_num_batched_tokens must be 'auto' or a positive whole number, got 'all'"
    ):
        EngineConfig(max_num_batched_tokens="all")  # type: ignore[arg-type]
