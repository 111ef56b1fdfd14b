"""What a model asks of attention is computed or refused by name, never ignored."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine import Engine, EngineConfig, Request
from engine.errors import ModelError
from engine.kernels.scoring import Scoring
from engine.model.attention_step import AttentionStep
from engine.model.stock_attention import attend

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class RecordingBackend:
    """Gives queries back, and notes what was asked for."""

    def write_kv(self, *_: object) -> None:
        pass

    def attend(self, query: torch.Tensor, k_cache: object, v_cache: object, work: object, scoring: Scoring) -> Any:
        self.asked = {field.name: getattr(scoring, field.name) for field in fields(scoring)}
        return query


PLAIN = {"scale": 0.25, "softcap": 0.0, "window": 0, "sinks": None}


def call(num_value_dims: int = 8, is_causal_module: bool = True, **keywords: object) -> dict[str, object]:
    """Calls layer 3's attention as a model of 64 positions would; returns what the backend was asked for."""
    backend = RecordingBackend()
    config = SimpleNamespace(max_position_embeddings=64)
    module = SimpleNamespace(layer_idx=3, config=config, is_causal=is_causal_module)
    caches = [torch.empty(1, 16, 2, 8)] * 4
    cache = SimpleNamespace(keys=caches, values=caches, layout=SimpleNamespace(windows=[0], tables=[0] * 4))
    step = AttentionStep(backend=backend, works=[None], cache=cache)  # type: ignore[arg-type]
    query, value = torch.ones(1, 2, 5, 8), torch.ones(1, 2, 5, num_value_dims)
    given = {"attention_mask": None, "scaling": 0.25} | keywords
    out, _ = attend(module, query, query, value, attention_step=step, **given)  # type: ignore[arg-type]
    assert out.shape == (1, 5, 2, 8)
    return backend.asked


SINKS = torch.zeros(2)


@pytest.mark.parametrize(
    ("keywords", "asked"),
    [
        ({"scaling": 0.7}, {"scale": 0.7}),
        ({"scaling": None}, {"scale": 8**-0.5}),
        ({"sliding_window": 63}, {"window": 63}),
        ({"softcap": 30.0}, {"softcap": 30.0}),
        ({"s_aux": SINKS}, {"sinks": SINKS}),
    ],
)
def test_what_changes_the_result_reaches_the_backend(keywords: dict[str, object], asked: dict[str, object]) -> None:
    assert call(**keywords) == PLAIN | asked  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "keywords",
    [
        {"sliding_window": None, "dropout": 0.0},
        {"sliding_window": 64},
        {"softcap": None, "s_aux": None, "position_bias": None},
        {"is_causal": True},
        {"is_causal": None, "use_cache": False, "output_attentions": False},
        {"position_ids": torch.arange(5)},
        {"anything": None},
    ],
)
def test_neutral_values_are_accepted(keywords: dict[str, object]) -> None:
    assert call(**keywords) == PLAIN  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"position_bias": torch.zeros(2, 5, 5)}, r"position_bias=<tensor of shape \(2, 5, 5\)>"),
        ({"dropout": 0.1}, r"dropout=0\.1"),
        ({"is_causal": False}, "is_causal=False"),
        ({"output_attentions": True}, "output_attentions=True"),
        ({"attention_mask": torch.ones(1, 1, 5, 5)}, r"attention_mask=<tensor of shape \(1, 1, 5, 5\)>"),
        ({"chunk_size": 8}, "chunk_size=8"),
    ],
)
def test_everything_else_is_refused_by_layer_and_keyword(keywords: dict[str, object], reason: str) -> None:
    with pytest.raises(ModelError, match=f"layer 3: attention with {reason} is not supported"):
        call(**keywords)  # type: ignore[arg-type]


def test_a_module_that_is_not_causal_is_refused() -> None:
    with pytest.raises(ModelError, match="layer 3: attention with is_causal=False is not supported"):
        call(is_causal_module=False)


def test_layers_of_another_kv_shape_are_refused() -> None:
    with pytest.raises(ModelError, match="layer 3: values of 2 heads of 6 dimensions, the model keeps 2 of 8"):
        call(num_value_dims=6)


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tiny_checkpoint: Callable[[str], Path]) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_checkpoint(request.param), dtype=torch.float32)


def generate(model: PreTrainedModel, attention: str) -> None:
    config = EngineConfig(dtype="float32", device="cpu", kv_memory_bytes=1 << 20, attention=attention)  # type: ignore[arg-type]
    engine = Engine.load(model, config)
    engine.generate([Request(request_id="a", token_ids=[5, 6, 7], max_new_tokens=2)])


@pytest.mark.parametrize("attention", ["torch", "auto"])
def test_what_the_supported_families_pass_is_accepted(model: PreTrainedModel, attention: str) -> None:
    generate(model, attention)


def test_a_native_layer_that_is_not_causal_is_refused(tiny_checkpoint: Callable[[str], Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint("qwen3"), dtype=torch.float32)
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(ModelError, match="layer 1: attention with is_causal=False is not supported"):
        generate(model, "native")


def test_a_weight_that_no_operation_reads_is_refused(tiny_llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    model.model.layers[0].self_attn.sinks = nn.Parameter(torch.zeros(4))
    with pytest.raises(ModelError, match=r"layer 0: the parameter self_attn\.sinks is not supported"):
        generate(model, "native")
