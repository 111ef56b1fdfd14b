"""What the gate of a GPU's first minutes refuses, beyond wrong answers."""

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.first_light import gate
from benchmarks.first_light.answers import Answering, _prompts, policies
from benchmarks.measuring.model_folder import read_model_shape
from benchmarks.measuring.wrong_answer import WrongAnswerError
from benchmarks.peers.judge_engine import JudgeEngine
from benchmarks.peers.protocol import Loaded, LoadSettings
from benchmarks.random_model import SHAPES, write_checkpoint
from engine import Engine, EngineConfig
from engine.kernels.triton.layers.fp8 import quantize_weights


@pytest.mark.parametrize(
    ("failures", "message"),
    [
        (["operation not permitted"], "1 captures of CUDA graphs failed: operation not"),
        ([], "no CUDA graph was captured"),
    ],
)
def test_answers_without_graphs_do_not_pass_for_answers_with_them(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, failures: list[str], message: str
) -> None:
    """An engine goes on where a capture fails, and answers alike."""

    def make_engine(answering: Answering, dtype: str, cuda_graphs: str = "auto") -> Any:
        config = EngineConfig(dtype=dtype, device="cpu", attention="torch", kv_memory_bytes=1 << 24)
        engine = Engine.load(str(tiny_llama), config)
        if cuda_graphs == "auto":
            found = {"capture_ms": [1.0] * len(failures), "failures": failures, "forward": lambda *_: None}
            engine._runner.graphs = SimpleNamespace(**found)  # type: ignore[assignment]
        return engine

    monkeypatch.setattr(Answering, "_engine", make_engine)
    answering = Answering(str(tiny_llama), "cpu", 500)
    answering._is_tiny = False
    with pytest.raises(WrongAnswerError, match=message):
        answering.with_graphs()


def test_an_error_in_place_of_an_answer_is_named(tiny_llama: Path) -> None:
    """Two empty answers would be the same answers."""
    answering = Answering(str(tiny_llama), "cpu", 500)
    few_bytes = 16 * read_model_shape(tiny_llama, "float32").kv_bytes_per_token
    engine = answering._engine("float32", attention="torch", kv_memory_bytes=few_bytes)
    with pytest.raises(WrongAnswerError, match="2 requests have an error in place of an answer: "):
        answering._require_same(engine, [[], []], "in little memory")


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({"preemption": "swap"}, "num_swapped_blocks"),
        ({"sharing": "none"}, "num_cached_tokens"),
    ],
)
def test_a_run_that_does_not_go_the_way_it_checks_is_no_check(
    tiny_llama: Path, settings: dict[str, Any], missing: str
) -> None:
    answering = Answering(str(tiny_llama), "cpu", 500)
    answering._is_tiny = False
    with pytest.raises(WrongAnswerError, match=f"did not go the way that it checks: {missing} is 0"):
        answering.judge("float32", attention="torch", **settings)


def test_policies_go_the_ways_that_they_check(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SHAPES["tiny"])
    answering = Answering(str(tmp_path), "cpu", SHAPES["tiny"]["vocab_size"])
    answering._is_tiny, answering._num_new = False, 16
    answering._prompts = _prompts(SHAPES["tiny"]["vocab_size"], 24)
    kv_bytes_per_token = read_model_shape(tmp_path, "float32").kv_bytes_per_token
    for name, settings in policies(kv_bytes_per_token):
        if name in ("lookup", "server", "swap"):
            assert "num_greedy" in answering.judge("float32", **(settings | {"attention": "torch"}))


def test_transformers_model_is_loaded_once(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each comparison of the gate needs it."""
    loaded: list[str] = []

    def load(judge: JudgeEngine, settings: LoadSettings) -> Loaded:
        loaded.append(settings.model)
        return load_judge(judge, settings)

    load_judge = JudgeEngine.load
    monkeypatch.setattr(JudgeEngine, "load", load)
    answering = Answering(str(tiny_llama), "cpu", 500)
    for dtype in ("float32", "bfloat16"):
        assert "largest_gap" in answering.judge(dtype, attention="torch")
    assert loaded == [str(tiny_llama)]


@pytest.fixture
def sanitizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in the place of compute-sanitizer; it is found as on a GPU's machine."""
    tool = tmp_path / "compute-sanitizer"
    tool.touch(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return tool


def test_a_check_that_fails_under_compute_sanitizer_is_a_failure(sanitizer: Path) -> None:
    sanitizer.write_text("#!/bin/sh\necho '= ERROR SUMMARY: 0 errors'\necho AssertionError >&2\nexit 1\n")
    with pytest.raises(WrongAnswerError, match="ended with 1: = ERROR SUMMARY: 0 errors: AssertionError"):
        gate._sanitize(lambda: 60.0)
    sanitizer.write_text("#!/bin/sh\necho '= Error: Device not supported. Please refer to ...'\nexit 1\n")
    assert gate._sanitize(lambda: 60.0) == "not run: Device not supported; not run: Device not supported"
    sanitizer.write_text("#!/bin/sh\necho '= ERROR SUMMARY: 0 errors'\n")
    assert gate._sanitize(lambda: 60.0) == "= ERROR SUMMARY: 0 errors; = ERROR SUMMARY: 0 errors"


def test_the_second_check_under_compute_sanitizer_has_what_the_first_leaves(
    sanitizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage is killed 25 s after its time, and the part with it."""
    limits: list[float] = []

    def run(command: list[str], *, timeout: float, **_: Any) -> None:
        limits.append(timeout)
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    left = iter([40.0, 0.0])
    assert gate._sanitize(lambda: next(left)) == "not run: it took too long; not run: it took too long"
    assert limits == [40.0, 10.0]


def in_13_bits(sums: np.ndarray) -> np.ndarray:
    """Sums whose significands are cut off after 13 bits."""
    significand, exponent = np.frexp(sums)
    return np.ldexp(np.trunc(significand * 2**13) / 2**13, exponent)


def test_sums_of_few_bits_pass_and_a_product_without_scales_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accumulator of a bit less than those of Hopper's matrix units, at the depth of an 8B model's products."""
    torch.manual_seed(0)
    rows, weights = (quantize_weights(torch.randn(size, 14336), torch.float8_e4m3fn) for size in (16, 64))
    left, right = rows.values.double().numpy(), weights.values.double().numpy()
    found = np.zeros((16, 64))
    for first in range(0, 14336, 32):
        part = slice(first, first + 32)
        found = in_13_bits(found + left[:, part] @ right[:, part].T)
    of_few_bits = torch.from_numpy(found) * rows.scales * weights.scales.t()
    monkeypatch.setattr(gate, "scaled_linear", lambda *_: of_few_bits)
    assert gate._fp8_error(rows, weights) > 0.4 * gate.MOST_FP8_ERROR
    of_one_scale = torch.from_numpy(left @ right.T) * rows.scales.mean() * weights.scales.mean()
    monkeypatch.setattr(gate, "scaled_linear", lambda *_: of_one_scale)
    with pytest.raises(WrongAnswerError, match="16 rows, matrix 64 x 14336: wrong by a share of 0"):
        gate._fp8_error(rows, weights)
