"""Families beside Llama's in batchloom's own layers, against transformers in float32."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
import transformers

from engine import Engine, EngineConfig, Request
from engine.kernels.cpu.native import NativeBackend
from engine.model.families.family import find_family
from engine.model.families.layouts import LAYOUTS
from engine.model.families.rotated_layers import order_of_dims
from engine.model.loading.checkpoint import is_plain
from engine.model.proof.tiny_model import VOCAB_SIZE, make_tiny_model, shrink
from tests.engine.model.families import FAMILIES, make_config

CPU = torch.device("cpu")
CONFIGS = {name: make_config(name) for name in FAMILIES}
NAMES = [name for name, config in CONFIGS.items() if config.model_type in LAYOUTS and not is_plain(config.to_dict())]
SHARED = [(7 * i) % 150 + 3 for i in range(50)]
PROMPTS = [*([*SHARED, 20 + number, 30 + number] for number in range(3)), [4] * 70, [9]]
LABELS = tuple((token,) for token in range(VOCAB_SIZE))


@cache
def _made(name: str) -> transformers.PreTrainedModel:
    return make_tiny_model(shrink(CONFIGS[name]))


def built(name: str) -> transformers.PreTrainedModel:
    """A model of its own, which an engine may take apart."""
    return copy.deepcopy(_made(name))


def test_every_layout_is_tested() -> None:
    assert {CONFIGS[name].model_type for name in NAMES} == set(LAYOUTS)


@pytest.mark.parametrize("name", NAMES)
def test_packed_layers_are_as_near_as_rounding_allows(name: str) -> None:
    """With shared prefixes and in chunks; transformers' own bfloat16 sets the bound."""
    model = built(name).bfloat16()
    wide = built(name).bfloat16().float()
    expected = [_logprobs(wide, prompt) for prompt in PROMPTS]
    stock = max(
        float((_logprobs(model, prompt) - logprobs).abs().max())
        for prompt, logprobs in zip(PROMPTS, expected, strict=True)
    )
    assert _largest_error(model, expected) < 1.5 * stock


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "not packed"])
@pytest.mark.parametrize("name", NAMES)
def test_layers_in_float32_are_transformers(name: str, is_packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed, and in transformers' own layers, as where sizes are no multiples of 32."""
    if not is_packed:
        monkeypatch.setattr(NativeBackend, "pack", lambda *weights: None)
    model = built(name)
    expected = [_logprobs(model, prompt) for prompt in PROMPTS]
    largest = max(float(logprobs.abs().max()) for logprobs in expected)
    assert _largest_error(model, expected, is_packed) < 1e-6 * largest


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_experts_of_sizes_that_grouped_products_do_not_take(name: str) -> None:
    config = shrink(CONFIGS[name])
    sizes = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
    config.update({size: 203 for size in sizes if hasattr(config, size)})
    model = make_tiny_model(config)
    model.set_experts_implementation("eager")
    expected = [_logprobs(model, prompt) for prompt in PROMPTS]
    model.set_experts_implementation("grouped_mm")
    largest = max(float(logprobs.abs().max()) for logprobs in expected)
    assert _largest_error(model, expected, is_packed=False) < 1e-6 * largest


def _largest_error(model: transformers.PreTrainedModel, expected: list[torch.Tensor], is_packed: bool = True) -> float:
    """Of the log probabilities that batchloom's layers give all tokens after each prompt.

    Args:
        expected: float64, a row for each prompt.
        is_packed: whether they are computed in one call of C++.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    config = EngineConfig(dtype=dtype, device="cpu", kv_memory_bytes=1 << 24, max_num_batched_tokens=64)
    engine = Engine.load(model, config)
    assert isinstance(engine._runner.attention, NativeBackend)
    assert engine._model.has_replaced_layers == is_packed
    asked = [Request(request_id=str(i), token_ids=p, mode="score", labels=LABELS) for i, p in enumerate(PROMPTS)]
    found = torch.tensor([completion.label_logprobs for completion in engine.score(asked)], dtype=torch.float64)
    return float((found - torch.stack(expected)).abs().max())


@torch.inference_mode()
def _logprobs(model: transformers.PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, -1]
    return logits.double().log_softmax(-1)


def operations(name: str) -> tuple[str, ...]:
    model = built(name)
    family = find_family(model, CPU, torch.float32)
    assert family is not None
    return family.read_weights(model.get_decoder().layers[0], 0).operations


def test_a_layer_does_what_its_weights_say() -> None:
    usual = ("attention_norm", "qkv", "rotate_and_write_kv", "attend", "select_rows")
    dense = ("mlp_norm", "gate_up", "down")
    assert operations("smollm3") == operations("phi4-mini") == (*usual, "output", *dense)
    assert operations("granite") == (
        *(*usual, "output_branch", "add_attention"),
        *("mlp_norm", "gate_up", "down_branch", "add_mlp"),
    )
    assert operations("gemma3_text") == (
        *("attention_input", "qkv", "norm_heads", *usual[2:], "output_branch", "add_attention"),
        *("mlp_input", "activate", "down_branch", "add_mlp"),
    )
    assert operations("starcoder2") == ("attention_input", *usual[1:], "output", "mlp_input", "activate", "down")
    assert operations("cohere2") == (
        *("attention_input", *usual[1:4], "select_normed_rows", "output", "gate_up", "down"),
    )
    assert (
        operations("mixtral") == operations("gpt_oss") == (*usual, "output", "mlp_norm", "route", "experts", "add_mlp")
    )


@pytest.mark.parametrize(
    ("class_name", "changes"),
    [
        ("HunYuanDenseV1", {"head_dim": 64}),
        ("SmolLM3", {"hidden_act": "relu"}),
        ("Cohere", {"use_qk_norm": True}),
        ("Olmoe", {"clip_qkv": 8.0}),
    ],
)
def test_what_is_not_covered_stays_with_transformers(class_name: str, changes: dict[str, Any]) -> None:
    model = make_tiny_model(shrink(getattr(transformers, f"{class_name}Config")(**changes)))
    assert find_family(model, CPU, torch.float32) is None


def test_no_other_device_or_format_is_covered() -> None:
    model = built("smollm3")
    assert find_family(model, torch.device("cuda"), torch.bfloat16) is None
    assert find_family(model, CPU, torch.int8) is None


@pytest.mark.parametrize(
    ("dims", "rotated", "is_interleaved", "order"),
    [
        (8, 8, False, None),
        (8, 8, True, [0, 2, 4, 6, 1, 3, 5, 7]),
        (8, 4, False, [0, 1, 4, 5, 2, 3, 6, 7]),
        (8, 4, True, [0, 2, 4, 5, 1, 3, 6, 7]),
    ],
)
def test_dimensions_rotated_together_are_half_a_head_apart(
    dims: int, rotated: int, is_interleaved: bool, order: list[int] | None
) -> None:
    found = order_of_dims(dims, rotated, is_interleaved)
    assert (None if found is None else found.tolist()) == order
