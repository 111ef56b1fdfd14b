"""A GPU measurement that crashes, hangs or loses the device costs its part or its stage alone."""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.first_light import __main__ as program
from benchmarks.first_light.results import DONE, FAILED, HUNG, TIMED_OUT, UNFINISHED, read_stage
from benchmarks.measuring.result_file import write_result
from tests.interpreting import INTERPRETING

ROOT = Path(__file__).parents[3]

CHILD = f"""#!{sys.executable}
import os, sys, time, types
from pathlib import Path
import torch
from benchmarks.first_light.__main__ import main

def lose():
    def synchronize():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, synchronize
    raise RuntimeError("CUDA error: unspecified launch failure")

def run(stage):
    log = Path(os.environ["LOG"])
    for name in os.environ["PARTS"]:
        def part():
            is_first = name not in log.read_text()
            log.write_text(log.read_text() + name)
            if is_first and name == "b":
                os.kill(os.getpid(), 11)
            if is_first and name == "d":
                lose()
            if is_first and name == "f":
                time.sleep(600)
        stage.measure(name, part)

sys.modules["benchmarks.first_light.gate"] = types.SimpleNamespace(run=run)
sys.exit(main(sys.argv[3:]))
"""
"""A stage in place of Python's own `-m benchmarks.first_light`; the first time, its parts b, d and f end it."""


def test_parts_that_end_their_process_hide_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts after them are measured in the same call; the next one repeats them, after what is new."""
    log, python, out = tmp_path / "log", tmp_path / "python", tmp_path / "out"
    log.touch()
    python.write_text(CHILD)
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(program, "PART_MINUTES", {"gate": 0.1})
    for name, value in (INTERPRETING | {"LOG": str(log), "PARTS": "abcdefg", "PYTHONPATH": str(ROOT)}).items():
        monkeypatch.setenv(name, value)
    arguments = ["--out", str(out), "--tiny", "--stages", "gate"]
    assert program.main(arguments) == FAILED
    assert log.read_text() == "abcdefg"
    found = read_stage(out, "gate")
    assert found["parts"].keys() == {*"abcdefg"}
    assert {name: part["failure"] for name, part in found["parts"].items() if "failure" in part} == {
        "b": "its process ended with -11",
        "d": "RuntimeError: CUDA error: unspecified launch failure",
        "f": "killed after 0.1 minutes",
    }
    assert found["status"] == "failed"
    monkeypatch.setenv("PARTS", "abcdefgh")
    assert program.main(arguments) == DONE
    assert log.read_text() == "abcdefghbdf"
    assert read_stage(out, "gate")["status"] == "done"


@pytest.mark.parametrize("exit_code", [TIMED_OUT, HUNG])
def test_a_part_for_which_the_stage_had_no_time_has_not_failed(tmp_path: Path, exit_code: int) -> None:
    """The next call begins it again, in its place."""
    write_result(tmp_path / "gate.json", {"parts": {"a": {"found": 1}}, "status": "begun", "running": "b"})
    os.utime(tmp_path / "gate.json", (0, 0))
    assert program.seconds_in_part(tmp_path, "gate") > 1e6
    assert program.end_part(tmp_path, "gate", exit_code) == (exit_code == HUNG)
    assert program.seconds_in_part(tmp_path, "gate") == 0
    found = read_stage(tmp_path, "gate")
    assert found["status"] == ("failed" if exit_code == HUNG else "begun")
    assert ("b" in found["parts"]) == (exit_code == HUNG)


@pytest.mark.parametrize(
    ("body", "seconds", "exit_code", "of_all"),
    [
        ("import os; os.kill(os.getpid(), 11)", 60, -11, FAILED),
        ("import time; time.sleep(600)", 1, TIMED_OUT, UNFINISHED),
    ],
)
def test_a_crash_and_a_hang_cost_their_stage_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, seconds: float, exit_code: int, of_all: int
) -> None:
    """The first stage ends badly, at its limit at the latest; the second one is run. A limit is no failure."""
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nimport sys\nif 'gate' in sys.argv:\n    {body}\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(program, "STAGE_MINUTES", {"gate": seconds / 60, "tuning": 1.0})
    monkeypatch.setattr(program, "LEAST_SECONDS", 0.0)
    started = time.monotonic()
    out = tmp_path / "out"
    assert program.main(["--out", str(out), "--stages", "gate", "tuning"]) == of_all
    assert time.monotonic() - started < 40
    stages = json.loads((out / "stages.json").read_text())
    assert (stages["gate"]["exit_code"], stages["tuning"]["exit_code"]) == (exit_code, 0)


def test_stages_without_time_are_named(tmp_path: Path) -> None:
    assert program.main(["--out", str(tmp_path), "--minutes", "0"]) == UNFINISHED
    unfinished = {"exit_code": UNFINISHED, "seconds": 0.0}
    stages = json.loads((tmp_path / "stages.json").read_text())
    assert stages == dict.fromkeys(("environment", "gate", "batches", "tuning", "attention", "again"), unfinished)


def test_without_git_the_commit_has_to_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else results of two trees would count as those of one."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit):
        program.main(["--out", str(tmp_path), "--minutes", "0"])
    assert "name it with --commit" in capsys.readouterr().err
    assert program.main(["--out", str(tmp_path), "--minutes", "0", "--commit", "abc"]) == UNFINISHED


def test_what_a_stage_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {tmp_path}/pid\nwait\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    arguments = argparse.Namespace(out=tmp_path, tiny=False, commit=None)
    assert program.run_stage("gate", arguments, 2.0)["exit_code"] == 124
    pid = int((tmp_path / "pid").read_text())
    status = Path(f"/proc/{pid}/status")
    deadline = time.monotonic() + 30
    while not (not status.exists() or "zombie" in status.read_text()):  # a killed process is gone a moment later
        assert time.monotonic() < deadline
        time.sleep(0.05)
