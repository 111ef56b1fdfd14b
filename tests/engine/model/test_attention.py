"""Which attention backend is chosen, and what is said where the fast one cannot be had."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kernels.attention_backend import AttentionBackend
from engine.kernels.cpu.native_build import load_library
from engine.kv.kv_cache import KVShape
from engine.model.attention import make_attention

SHAPE = KVShape(num_layers=1, num_kv_heads=1, head_dim=32, dtype=torch.float32)


def make(name: str, *, block_size: int = 32, device: str = "cpu", has_layers: bool = True) -> AttentionBackend:
    config = EngineConfig(attention=name, block_size=block_size)  # type: ignore[arg-type]
    return make_attention(config, torch.device(device), num_q_heads=2, kv_shape=SHAPE, has_layers=has_layers)


def test_auto_is_native_where_it_compiles() -> None:
    assert make("auto").name == "native"
    assert make("torch").name == "torch"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"block_size": 16}, "block_size 16 is not a multiple of 32"),
    ],
)
def test_what_native_does_not_cover_is_torchs_and_said(
    settings: dict[str, int], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="batchloom.engine"):
        assert make("auto", **settings).name == "torch"  # type: ignore[arg-type]
    assert caplog.messages[0].startswith("torch computes the layers, and the night takes about twice as long: ")
    with pytest.raises(ConfigError, match=f"attention 'native': {reason}"):
        make("native", **settings)  # type: ignore[arg-type]


def test_native_attention_serves_layers_that_are_not_its_own() -> None:
    assert make("auto", has_layers=False).name == "native"


def test_without_a_compiler_the_line_says_what_it_costs_and_which_package_mends_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load_library.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.INFO, logger="batchloom.engine"):
        assert make("auto").name == "torch"
    load_library.cache_clear()
    assert caplog.messages == [
        "torch computes the layers, and the night takes about twice as long: there is no C++ compiler "
        "('no-such-compiler' is not on the path); on Debian and Ubuntu `apt install g++` installs one"
    ]


def test_a_backend_of_the_other_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="attention 'native' runs on the CPU, not on cuda"):
        make("native", device="cuda")


def test_a_gpu_whose_matrix_units_triton_does_not_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="Tesla T4", major=7, minor=5, multi_processor_count=40)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch, "version", SimpleNamespace(hip=None))
    why = "attention 'fused': Tesla T4 has compute capability 7.5, 8.0 is needed: set device to cpu"
    for name in ("auto", "fused"):
        with pytest.raises(ConfigError, match=why):
            make(name, device="cuda")
    gpu.major, gpu.minor = 8, 6
    assert make("auto", device="cuda").name == "fused"


BARE_PROGRAM = """
import sys
sys.modules.update(dict.fromkeys(["triton", "binpacking"]))
from engine import Engine, EngineConfig, Request
engine = Engine.load(sys.argv[1], EngineConfig(dtype="float32", device="cpu", kv_memory_bytes=1 << 20))
print(engine.generate([Request(request_id="a", token_ids=[5, 6], max_new_tokens=2)])[0].num_output_tokens)
"""


def test_an_engine_runs_without_triton_binpacking_and_a_compiler(tiny_llama: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BARE_PROGRAM, str(tiny_llama)],
        env=os.environ | {"CXX": "no-such-compiler"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.strip() == "2"
