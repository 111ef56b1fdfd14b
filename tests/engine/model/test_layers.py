"""What a model asks of attention is computed or refused by name, never ignored."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine import Engine, EngineConfig, Request
from engine.errors import ModelError
from engine.model.layers import attend

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class RecordingBackend:
    """Gives queries back, and notes the scale."""

    def write_kv(self, *_: object) -> None:
        pass

    def attend(self, query: torch.Tensor, *_: object, scale: float) -> torch.Tensor:
        self.scale = scale
        return query


def call(**keywords: object) -> float:
    """Calls layer 3's attention as a model of 64 positions would; returns the scale that was used."""
    backend = RecordingBackend()
    module = SimpleNamespace(layer_idx=3, config=SimpleNamespace(max_position_embeddings=64))
    step = SimpleNamespace(backend=backend, work=None, cache=SimpleNamespace(keys=[None] * 4, values=[None] * 4))
    query = torch.ones(1, 2, 5, 8)
    given = {"attention_mask": None, "scaling": 0.25} | keywords
    out, _ = attend(module, query, query, query, attention_step=step, **given)  # type: ignore[arg-type]
    assert out.shape == (1, 5, 2, 8)
    return backend.scale


def test_scaling_is_used() -> None:
    assert call(scaling=0.7) == 0.7


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
    assert call(**keywords) == 0.25


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"sliding_window": 63}, "sliding_window=63"),
        ({"softcap": 30.0}, r"softcap=30\.0"),
        ({"s_aux": torch.zeros(2)}, r"s_aux=<tensor of shape \(2,\)>"),
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
        call(**keywords)


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


@pytest.mark.parametrize("attention", ["torch", "native"])
def test_a_layer_that_slides_is_refused(tiny_checkpoint: Callable[[str], Path], attention: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint("qwen3"), dtype=torch.float32)
    model.model.layers[1].self_attn.sliding_window = 2
    with pytest.raises(ModelError, match="layer 1: attention with sliding_window=2 is not supported"):
        generate(model, attention)


def test_a_weight_that_no_operation_reads_is_refused(tiny_llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    model.model.layers[0].self_attn.sinks = nn.Parameter(torch.zeros(4))
    with pytest.raises(ModelError, match=r"layer 0: the parameter self_attn\.sinks is not supported"):
        generate(model, "native")
