"""A device and a number of threads that are not there are found before any work."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine import Engine, EngineConfig
from engine.device.placement import check_device, resolve_device, use_device, use_threads
from engine.errors import ConfigError


def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("cuda", "cuda:1"):
        with pytest.raises(ConfigError, match=f"device '{name}': torch finds no GPU here; use cpu or auto"):
            check_device(name)
    with pytest.raises(ConfigError, match="torch finds no GPU here"):
        Engine.load(tmp_path / "no model", EngineConfig(device="cuda"))
    assert resolve_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("cuda", "cuda:0", "cuda:1"):
        check_device(name)
    with pytest.raises(ConfigError, match="device 'cuda:2': torch finds 2 here, the last is 'cuda:1'"):
        check_device("cuda:2")


def test_a_device_without_a_number_is_the_one_that_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a second engine on another GPU does not move the first one's launches there."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert use_device(torch.device("cuda")) == torch.device("cuda", 3)
    assert use_device(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert use_device(torch.device("cpu")) == torch.device("cpu")
    assert chosen == [3, 1]


def test_a_name_that_torch_does_not_know_is_refused() -> None:
    for name in ("quantum", ""):
        with pytest.raises(ConfigError, match=f"device '{name}' is not known to torch"):
            check_device(name)


def test_a_device_of_another_kind_is_refused() -> None:
    for name in ("mps", "meta", "xpu:1"):
        with pytest.raises(ConfigError, match=f"device '{name}' is not supported; use cpu, cuda or auto"):
            check_device(name)
    check_device("cpu:0")


def test_the_usual_names_are_checked_without_torch() -> None:
    code = "import sys; from engine.device.placement import check_device; check_device('cpu'); check_device('auto')"
    code += "; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_there_are_no_more_threads_than_cores(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    used: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    num_cores = len(os.sched_getaffinity(0))
    with caplog.at_level(logging.INFO, "batchloom.engine"):
        for num_threads in (1, num_cores):
            use_threads(num_threads)
        assert not caplog.messages
        use_threads(9999)
    assert used == [1, num_cores, num_cores]
    assert caplog.messages == [f"num_threads is 9999, this process may use {num_cores} cores: {num_cores} threads"]
