"""Models whose weights stay as a GGUF file has them: the answers of unpacked weights, in the file's memory."""

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine import Engine, EngineConfig, Request
from engine.errors import ConfigError, ModelError
from engine.kernels.cpu.native_build import load_library
from engine.model.loading.checkpoint import checkpoint_digest
from engine.model.loading.gguf import write_tensor_table
from engine.model.model_shape import ModelShape
from engine.model.proof.tiny_model import make_tiny_model, shrink
from engine.model.quantized.quantized_model import find_quantized
from tasks.forecast.hardware import choose_hardware
from tasks.workers.engine_team import EngineTeam
from tests.engine.model.families import make_config
from tests.engine.model.quantized_files import write_quantized

SHARED = [(7 * i) % 490 + 3 for i in range(70)]
PROMPTS = [[*SHARED, 20, 30], [*SHARED, 21, 31, 32], [4] * 50, [9]]
K_FORMATS = {"weight": "Q4_K", "ffn_down": "Q5_K", "attn_v": "Q6_K", "token_embd": "Q6_K"}
"""As files of type Q4_K_M mix them."""


def load(checkpoint: Path, **settings: Any) -> Engine:
    return Engine.load(checkpoint, EngineConfig(**{"device": "cpu", "kv_memory_bytes": 1 << 22} | settings))


def answers_of(engine: Engine, vocab_size: int = 500) -> list[object]:
    """Token ids, and scores to the last bit; of prompts of tokens below `vocab_size`."""
    prompts = [[token % vocab_size for token in prompt] for prompt in PROMPTS]
    labels = ((5,), (9, 11), (9, 400 % vocab_size, 3))
    generated = [
        Request(request_id=str(i), token_ids=prompt, max_new_tokens=6, ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]
    scored = [
        Request(request_id=str(i), token_ids=prompt, mode="score", labels=labels) for i, prompt in enumerate(prompts)
    ]
    return [
        *(answer.token_ids for answer in engine.generate(generated)),
        *(answer.label_logprobs for answer in engine.score(scored)),
    ]


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("llama", {"weight": "Q8_0"}),
        ("llama", K_FORMATS),
        ("qwen2", {"weight": "Q4_0", "ffn_gate": "Q5_0", "ffn_up": "Q4_1", "attn_k": "Q5_1"}),
        ("qwen3", {"weight": "Q4_K", "attn_output": "F16", "attn_q": "BF16"}),
    ],
)
def test_answers_are_those_of_the_unpacked_weights(
    family: str,
    kinds: dict[str, str],
    computed: str,
    shaped: Callable[[str], Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    opened, plain = write_quantized(shaped(family), tmp_path, kinds)
    with caplog.at_level(logging.INFO, logger="batchloom.engine"):
        engine = load(opened)
    assert f"weights stay quantized as in model.gguf; dtype {computed} would unpack them" in caplog.messages
    found = answers_of(engine)
    expected = answers_of(load(plain, dtype=computed))
    if computed == "float32":  # torch computes its output layer, which has 500 columns
        expected = [pytest.approx(each, abs=1e-6) for each in expected]
    assert found == expected
    assert found == answers_of(load(opened, dtype="quantized", max_num_batched_tokens=64))
    widened = 1.6 if computed == "float32" and "F16" in kinds.values() else 1.1  # two bytes become four
    assert engine._model.weight_bytes < widened * (tmp_path / "model.gguf").stat().st_size
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    for prompt, written in zip(PROMPTS, found[: len(PROMPTS)], strict=True):
        assert isinstance(written, tuple)
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *written[:-1]]]), logits_to_keep=len(written)).logits[0]
        chosen = logits[torch.arange(len(written)), list(written)]
        spread = logits.amax(-1) - logits.amin(-1)
        assert ((logits.amax(-1) - chosen) / spread).max() < (0.05 if computed == "bfloat16" else 0.0001)


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("gemma2", {"weight": "Q8_0"}),
        ("gemma3_text", {"weight": "Q4_0", "token_embd": "Q8_0", "ffn_down": "F16"}),
        ("phi3", {"weight": "Q5_1"}),
        ("qwen3_moe", {"weight": "Q4_1", "ffn_down": "Q8_0", "ffn_up": "Q5_0"}),
        ("starcoder2", {"weight": "Q8_0"}),
    ],
)
def test_so_are_those_of_families_with_more_operations(
    family: str, kinds: dict[str, str], computed: str, tmp_path: Path
) -> None:
    """Norms with an offset, caps, windows, fused products, experts, biases."""
    config = shrink(make_config(family))
    make_tiny_model(config).save_pretrained(tmp_path / "tiny")
    opened, plain = write_quantized(tmp_path / "tiny", tmp_path, kinds)
    found = answers_of(load(opened, dtype="quantized"), config.vocab_size)
    assert found == answers_of(load(plain, dtype=computed), config.vocab_size)
    assert found == answers_of(load(opened, max_num_batched_tokens=64), config.vocab_size)


def test_what_is_not_covered_is_named(
    shaped: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened, plain = write_quantized(shaped("llama"), tmp_path, {"weight": "Q8_0", "ffn_down": "TQ2_0"})
    with pytest.raises(
        ModelError, match=r"model\.gguf': dtype 'quantized': tensor blk\.0\.ffn_down\.weight has format TQ2_0"
    ):
        load(opened, dtype="quantized")
    with caplog.at_level(logging.INFO, logger="batchloom.engine"):
        assert find_quantized(opened, EngineConfig(), torch.device("cpu")) is None
    assert "the weights of model.gguf are unpacked: tensor blk.0.ffn_down.weight has format TQ2_0" in caplog.messages
    (tmp_path / "covered").mkdir()
    covered, _ = write_quantized(shaped("llama"), tmp_path / "covered", {"weight": "Q8_0"})
    with pytest.raises(ModelError, match="block_size 48 is not a multiple of 32"):
        load(covered, dtype="quantized", block_size=48)
    with pytest.raises(ConfigError, match="dtype 'quantized' is for GGUF files"):
        load(plain, dtype="quantized")
    with pytest.raises(ConfigError, match="dtype 'quantized' is computed on a CPU by attention 'native'"):
        EngineConfig(dtype="quantized", attention="torch")
    config = json.loads((covered / "config.json").read_text())
    (covered / "config.json").write_text(json.dumps(config | {"intermediate_size": 256}))
    with pytest.raises(ModelError, match=r"layer 0 has a matrix of \(1024, 256\), config.json says \(512, 256\)"):
        load(covered)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="has 4 bytes, its tensors end at"):
        load(opened)
    (tmp_path / "model.gguf").unlink()
    with pytest.raises(ModelError, match=r"cannot be read: .*No such file"):
        load(opened)


def test_without_a_compiler_a_line_says_once_that_weights_are_unpacked(
    shaped: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forecast looks at the weights again; the line about attention says why there are no kernels."""
    opened, _ = write_quantized(shaped("llama"), tmp_path, {"weight": "Q8_0"})
    load_library.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.INFO, logger="batchloom.engine"):
        assert find_quantized(opened, EngineConfig(), torch.device("cpu")) is None
        choose_hardware(opened, EngineTeam(engine=EngineConfig()))
    with pytest.raises(ModelError, match=r"model\.gguf': dtype 'quantized': there is no C\+\+ compiler \('no-such-"):
        load(opened, dtype="quantized")
    load_library.cache_clear()
    assert caplog.messages == ["the weights of model.gguf are unpacked: to stay quantized they need compiled kernels"]


def test_a_forecast_counts_the_bytes_of_the_file(computed: str, shaped: Callable[[str], Path], tmp_path: Path) -> None:
    opened, plain = write_quantized(shaped("llama"), tmp_path, {"weight": "Q8_0"})
    unpacked = EngineTeam(engine=EngineConfig(dtype=computed))  # type: ignore[arg-type]
    hardware = choose_hardware(opened, EngineTeam(engine=EngineConfig()))
    assert isinstance(shape := hardware.shape, ModelShape)
    wide = choose_hardware(plain, unpacked).shape
    assert hardware.dtype == computed
    assert shape.weight_bytes == round(wide.weight_bytes * 34 / 32 / wide.value_bytes)
    assert shape.kv_bytes_per_token == wide.kv_bytes_per_token
    assert choose_hardware(opened, unpacked).shape == wide


def test_a_checkpoint_is_the_same_wherever_its_file_lies(shaped: Callable[[str], Path], tmp_path: Path) -> None:
    opened, _ = write_quantized(shaped("llama"), tmp_path, {"weight": "Q8_0"})
    before = checkpoint_digest(opened)
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.move(tmp_path / "model.gguf", tmp_path / "elsewhere" / "other.gguf")
    write_tensor_table(Path(moved), opened)
    assert checkpoint_digest(opened) == before
    config = json.loads((opened / "config.json").read_text())
    (opened / "config.json").write_text(json.dumps(config | {"transformers_version": "5.1.0"}))
    assert checkpoint_digest(opened) == before, "made by another release of transformers"
    data = bytearray(Path(moved).read_bytes())
    data[-5] ^= 1
    Path(moved).write_bytes(data)
    assert checkpoint_digest(opened) != before


LOADING = """
import sys
from pathlib import Path
from engine import Engine, EngineConfig

def resident(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) * 1024

settings = EngineConfig(device="cpu", kv_memory_bytes=1 << 20)
Engine.load(sys.argv[1], settings)  # imports what loading needs
open("/proc/self/clear_refs", "w").write("5")
before = resident("VmRSS")
engine = Engine.load(sys.argv[2], settings)
print(resident("VmHWM") - before, engine._model.weight_bytes)
"""


def test_loading_takes_the_memory_of_the_file(shaped: Callable[[str], Path], tmp_path: Path) -> None:
    """The highest resident memory of a process while it loads, above what it had before."""
    (tmp_path / "small").mkdir()
    (tmp_path / "large").mkdir()
    small, _ = write_quantized(shaped("llama"), tmp_path / "small", K_FORMATS)
    config = AutoConfig.from_pretrained(small)
    config.update({"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 16000, "tie_word_embeddings": False})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "wide")
    large, _ = write_quantized(tmp_path / "wide", tmp_path / "large", K_FORMATS, has_plain=False)
    arguments = [sys.executable, "-c", LOADING, str(small), str(large)]
    done = subprocess.run(
        arguments, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    peak_bytes, weight_bytes = map(int, done.stdout.split()[-2:])
    file_bytes = (tmp_path / "large" / "model.gguf").stat().st_size
    assert file_bytes > 30e6
    assert 0.9 * weight_bytes < peak_bytes < 1.2 * file_bytes + (1 << 20)  # and the KV cache
