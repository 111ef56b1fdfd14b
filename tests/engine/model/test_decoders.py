"""Decoder families against transformers' own `generate`, as the probe compares them; docs/models.md has their table."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PretrainedConfig

from engine import Engine, EngineConfig, Request
from engine.errors import RequestError
from engine.model import stock_attention
from engine.model.families.family import find_family
from engine.model.loading.checkpoint import is_plain
from engine.model.longest_sequence import longest_sequence
from engine.model.model import Model
from engine.model.proof.probe import prove
from engine.model.proof.tiny_model import make_tiny_model, shrink
from engine.model.proof.tiny_run import NUM_NEW_TOKENS, find_difference, prompts
from engine.model.stock_model import refuse_known
from tests.engine.model.families import FAMILIES, make_config

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keywords of all calls of our attention function."""
    calls: list[dict[str, Any]] = []
    original = stock_attention.attend

    def attend(module: Any, *tensors: Any, **keywords: Any) -> Any:
        calls.append(keywords)
        return original(module, *tensors, **keywords)

    monkeypatch.setattr(stock_attention, "attend", attend)
    return calls


def row(name: str, config: PretrainedConfig, tiny: PretrainedConfig, calls: list[dict[str, Any]]) -> str:
    """The family's line of the table."""
    longest = config.max_position_embeddings
    windows = {(call.get("sliding_window") or longest) < longest for call in calls}
    is_capped = any(call.get("softcap") for call in calls)
    has_sinks = any(call.get("s_aux") is not None for call in calls)
    model = make_tiny_model(tiny)
    family = find_family(model, torch.device("cpu"), torch.float32)
    if is_plain(config.to_dict()):
        windows = {(getattr(config, "sliding_window", None) or longest) < longest}
    elif family is not None:
        assert not calls, "all of them are computed by batchloom's layers"
        weights = [family.read_weights(layer, index) for index, layer in enumerate(model.get_decoder().layers)]
        scorings = [found.scoring for found in weights]
        windows, is_capped = {found.window > 0 for found in scorings}, any(found.softcap for found in scorings)
        has_sinks = any(found.sinks is not None for found in scorings)
    attention = " and ".join(
        kind for kind, is_there in (("window", True in windows), ("full", False in windows)) if is_there
    )
    attention += "".join(f", {kind}" for kind, is_there in (("soft cap", is_capped), ("sinks", has_sinks)) if is_there)
    modules = [type(module).__name__ for module in model.modules()]
    feed_forward = "experts" if any("Experts" in module for module in modules) else "dense"
    layers = "batchloom" if is_plain(config.to_dict()) else "transformers" if family is None else "batchloom on CPUs"
    return f"| {name} | `{config.model_type}` | {attention} | {feed_forward} | {layers} |"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_computed_as_generate_does(name: str, asked: list[dict[str, Any]]) -> None:
    """Whole prompts, shared prefixes in chunks, and preempted; tokens and log-probabilities."""
    config = make_config(name)
    refuse_known(config)
    tiny = shrink(config)
    num_preempted = 0

    def count(step: Any) -> None:
        nonlocal num_preempted
        num_preempted += step.num_preempted_requests

    def make_engine(model: Model, config: EngineConfig) -> Engine:
        made = Engine(model, config)
        made.run_plan = partial(made.run_plan, on_step=count)  # type: ignore[method-assign]
        return made

    assert find_difference(tiny, make_engine) is None
    assert num_preempted > 0
    assert row(name, config, tiny, asked) in PAGE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", ["mistral, a window", "gemma2", "gpt_oss"])
def test_windows_caps_and_sinks_are_computed_without_a_compiler(name: str) -> None:
    def make_engine(model: Model, config: EngineConfig) -> Engine:
        return Engine(model, replace(config, attention="torch"))

    assert find_difference(shrink(make_config(name)), make_engine) is None


def test_the_page_lists_these_families_alone() -> None:
    rows = [line.split("|")[1].strip() for line in PAGE.read_text(encoding="utf-8").splitlines() if "| `" in line]
    assert rows == list(FAMILIES)


@pytest.mark.parametrize(("name", "longest"), [("llama", 2048), ("phi4-mini", 4096), ("gemma3_text", 131072)])
def test_sequences_end_where_positions_would_depend_on_the_batch(name: str, longest: int) -> None:
    assert longest_sequence(make_config(name)) == longest


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "cohere2"])
def test_experts_on_a_gpu_are_grouped_products(name: str) -> None:
    """What is asked for, whatever the model had; no tensor is moved."""
    language_model = make_tiny_model(shrink(make_config(name)))
    language_model.config._experts_implementation = "eager"
    Model(language_model, device=torch.device("cuda"), owns_weights=False)
    asked = {
        module.config._experts_implementation
        for module in language_model.modules()
        if type(module).__name__.endswith("Experts")
    }
    assert asked == ({"grouped_mm"} if name != "cohere2" else set())


def test_the_text_model_in_a_model_of_images_is_computed() -> None:
    """Gemma 3 with its vision tower: its decoder is that of the text model, which is compared."""
    prove(transformers.Gemma3Config(), Engine)


def test_longrope_is_computed_up_to_its_first_length_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """The longest prompt with its answer reaches the length exactly; one token more is refused with the length."""
    config = shrink(make_config("phi4-mini"))
    length = max(map(len, prompts())) + NUM_NEW_TOKENS
    config.original_max_position_embeddings = config.rope_parameters["original_max_position_embeddings"] = length
    assert find_difference(config, Engine) is None
    with caplog.at_level("INFO", logger="batchloom.engine"):
        model = Model(make_tiny_model(config), device=torch.device("cpu"), owns_weights=False)
    assert f"sequences end at {length} tokens, where longrope changes its angles" in caplog.text
    engine = Engine(model, EngineConfig(dtype="float32", device="cpu", kv_memory_bytes=1 << 24))
    too_long = Request(request_id="long", token_ids=[5] * length, max_new_tokens=1)
    with pytest.raises(RequestError, match=f"exceeds the context of {length}"):
        engine.generate([too_long])
