"""The proof at the door: what is refused and why, and what is remembered."""

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig

from engine import Engine, EngineConfig, Request
from engine.errors import ModelError
from engine.kernels.cpu.native_build import load_library
from engine.model import attention, stock_attention
from engine.model.loading.checkpoint import cache_folder
from engine.model.model import Model
from engine.model.proof import probe
from engine.model.proof.probe import prove

PAGE = Path(__file__).parents[4] / "docs" / "models.md"

SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
LAYERS = ["full_attention", "sliding_attention", "sliding_attention"]


def vault_gemma(**switches: Any) -> PretrainedConfig:
    """A family with windows and a soft cap that transformers' own layers compute."""
    return transformers.VaultGemmaConfig(**SIZES, layer_types=LAYERS, sliding_window=100, **switches)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is remembered from other tests; the compiled kernels are there."""
    shutil.copy(load_library(cache_folder(), "native")._name, tmp_path)
    monkeypatch.setenv("BATCHLOOM_CACHE", str(tmp_path))
    return tmp_path


def without(monkeypatch: pytest.MonkeyPatch, keyword: str) -> None:
    """Has our attention function forget a keyword."""
    original = stock_attention.attend

    def attend(*tensors: Any, **keywords: Any) -> Any:
        return original(*tensors, **keywords | {keyword: None})

    monkeypatch.setattr(stock_attention, "attend", attend)
    monkeypatch.setitem(AttentionInterface._global_mapping, stock_attention.ATTENTION_NAME, attend)


def test_a_forgotten_window_is_found_with_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "sliding_window")
    reason = "layer 1: it sees positions outside its sliding_window"
    with pytest.raises(ModelError, match=f"architecture 'vaultgemma' is not supported: {reason}"):
        prove(vault_gemma(), Engine)


def test_a_forgotten_soft_cap_is_found_with_its_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "softcap")
    switch = r"layer 0 is the first that differs, but not with attn_logit_softcapping=None in place of 2\.0"
    with pytest.raises(ModelError, match=switch):
        prove(vault_gemma(attn_logit_softcapping=2.0), Engine)


def test_forgotten_sinks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "s_aux")
    config = transformers.GptOssConfig(**SIZES, num_local_experts=4, layer_types=LAYERS)

    def make_engine(model: Model, config: EngineConfig) -> Engine:
        return Engine(model, replace(config, attention="torch"))  # whose layers call the attention function

    with pytest.raises(ModelError, match="layer 0 is the first that differs"):
        prove(config, make_engine)


def test_what_depends_on_the_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone each prompt is right; in a batch every row is given the first sequence's first block."""
    original = attention.NativeBackend.prepare

    def prepare(self: Any, batch: Any) -> Any:
        tables = batch.suffix_block_table.copy()
        tables[:] = tables[0]
        return original(self, replace(batch, suffix_block_table=tables) if len(batch.suffix_lens) > 1 else batch)

    monkeypatch.setattr(attention.NativeBackend, "prepare", prepare)
    with pytest.raises(ModelError, match=r"with whole prompts, .* it depends on the rest of the batch"):
        prove(vault_gemma(), Engine)


def test_what_is_alike_is_remembered_by_its_switches(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, empty_cache: Path
) -> None:
    with caplog.at_level(logging.INFO, logger="batchloom.engine"):
        prove(vault_gemma(), Engine)
    is_new = "architecture 'vaultgemma' is new here: a tiny model of it is compared with transformers, once"
    assert is_new in caplog.messages
    assert len(list((empty_cache / "proven").glob("vaultgemma-*.json"))) == 1

    def compare(*_: Any) -> None:
        raise AssertionError("compared")

    monkeypatch.setattr(probe, "find_difference", compare)
    prove(vault_gemma(), Engine)
    larger = SIZES | {"intermediate_size": 200, "vocab_size": 999}
    prove(transformers.VaultGemmaConfig(**larger, layer_types=LAYERS, sliding_window=80), Engine)
    with pytest.raises(AssertionError, match="compared"):
        prove(vault_gemma(attn_logit_softcapping=3.0), Engine)
    with monkeypatch.context() as without_kernels:
        without_kernels.setenv("CXX", "no-such-compiler")
        load_library.cache_clear()
        with pytest.raises(AssertionError, match="compared"):
            prove(vault_gemma(), Engine)
    prove(vault_gemma(), Engine)
    monkeypatch.setattr(probe, "_versions", lambda: {"transformers": "6.0"})
    with pytest.raises(AssertionError, match="compared"):
        prove(vault_gemma(), Engine)


def test_a_cache_that_cannot_be_written_keeps_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BATCHLOOM_CACHE", str(tmp_path / "file" / "cache"))
    prove(vault_gemma(), Engine)
    assert not list(tmp_path.rglob("vaultgemma-*"))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("DeepseekV3", "projections of one small vector a token \\(MLA\\), which KV blocks do not hold"),
        ("Qwen3Next", "keep a state in place of KV"),
        ("Mamba", "keep a state in place of KV"),
        ("Lfm2", "keep a state in place of KV"),
        ("T5", "attends to an encoder \\(cross attention\\), and KV is kept for prompts alone"),
        ("Albert", "transformers has no causal language model of it$"),
        ("Llava", "transformers has no causal language model of it$"),
        ("Gemma3nText", "some of its layers read the KV of others"),
        ("StableLm", "layer 0: the model does not pass keywords on to its attention"),
        ("Falcon", "layer 0 does not use transformers' attention interface"),
        ("Llama4Text", "chunks"),
    ],
)
def test_what_cannot_be_computed_is_refused_with_its_reason(kind: str, reason: str) -> None:
    with pytest.raises(ModelError, match=f"is not supported: .*{reason}"):
        prove(getattr(transformers, f"{kind}Config")(), Engine)


def test_a_window_that_the_architecture_ignores_is_refused() -> None:
    """KV outside it would be freed, which few tokens of a small model show."""
    config = transformers.Ernie4_5_MoeConfig(sliding_window=100, num_hidden_layers=4, num_key_value_heads=4)
    remedy = r"sliding_window: remove it from config\.json if the architecture ignores it$"
    with pytest.raises(ModelError, match=f"layer 0: it sees positions outside its {remedy}"):
        prove(config, Engine)
    with pytest.raises(ModelError, match=rf"log-probabilities differ by up to [\d.]+, but not without {remedy}"):
        prove(transformers.GraniteConfig(**SIZES, sliding_window=100), Engine)


@pytest.mark.parametrize("kind", ["DeepseekV3", "T5", "Mamba"])
def test_the_page_gives_the_same_reason(kind: str) -> None:
    with pytest.raises(ModelError) as refused:
        prove(getattr(transformers, f"{kind}Config")(), Engine)
    table = PAGE.read_text().partition("## What is refused")[2].partition("## ")[0]
    reasons = [line.split("|")[2].strip().removeprefix("such layers ") for line in table.splitlines() if "|" in line]
    said = str(refused.value).replace(" (MLA)", "")
    assert any(reason in said for reason in reasons), said


@pytest.fixture
def gemma_checkpoint(tmp_path: Path, tiny_checkpoint: Callable[[str], Path]) -> Path:
    folder = tmp_path / "gemma"
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(vault_gemma())
    model.save_pretrained(folder)
    return folder


def test_an_engine_loads_what_is_proven_and_says_whose_layers_compute(
    gemma_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(dtype="float32", device="cpu", kv_memory_bytes=1 << 22)
    with caplog.at_level(logging.INFO, logger="batchloom.engine"):
        engine = Engine.load(gemma_checkpoint, config)
    assert any("transformers' own layers compute" in message for message in caplog.messages)
    answer = engine.generate([Request(request_id="a", token_ids=[5, 6], max_new_tokens=3, ignore_eos=True)])[0]
    assert answer.num_output_tokens == 3


def test_an_engine_refuses_before_weights_are_read(gemma_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "sliding_window")
    next(gemma_checkpoint.glob("*.safetensors")).write_bytes(b"damaged")
    with pytest.raises(ModelError, match="architecture 'vaultgemma' is not supported: layer 1"):
        Engine.load(gemma_checkpoint, EngineConfig(dtype="float32", device="cpu"))
