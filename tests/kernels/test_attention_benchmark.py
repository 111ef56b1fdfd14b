"""The kernel benchmark without a GPU: its gate works, and it prints no figure."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import attention
from benchmarks.relay_model import equation_10

ROOT = Path(__file__).parents[2]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.attention", *arguments],
        cwd=ROOT, env=os.environ | hidden | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_every_implementation_passes_the_gate() -> None:
    done = run("--check", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-2000:]
    agreeing = [line.split()[0] for line in done.stdout.splitlines() if " agrees with float64 on " in line]
    assert set(agreeing) >= {"fused", "relay", "paged", "sdpa", "flex"}
    assert "us" not in done.stdout.split()


def test_without_a_gpu_there_is_no_figure(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path / "result.json"))
    assert done.returncode == 1
    assert "no GPU is at hand, so nothing was measured" in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_the_grid_is_fig_8_s() -> None:
    cases = list(attention.grid())
    assert len(cases) == len(set(cases)) == 2 * 3 * 27
    assert {(case.num_decode, case.num_prefill) for case in cases} == {(32, 0), (256, 0), (256, 7)}
    for case in cases:
        groups = case.groups()
        assert sum(len(group.members) for group in groups) == case.num_decode + case.num_prefill


def test_equation_10() -> None:
    """RelayAttention Fig. 6: no gain for one request, and towards (s + c) / (s / b + c) for long prompts."""
    assert equation_10(1, 4096, 128) < 1
    assert equation_10(32, 4096, 128) == pytest.approx(4226 / 263)


def test_a_wrong_result_of_ours_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    case = attention.Case(model="Qwen2-7B", prefix_len=16, own_len=4, num_members=2, num_decode=2, num_prefill=0,
                          prefill_rows=1)  # fmt: skip
    step = attention.Step.make(case, torch.device("cpu"))

    def implementations(_: attention.Step):
        yield "flex", lambda: torch.zeros_like(step.query)
        yield "fused", lambda: torch.full_like(step.query, torch.nan)

    monkeypatch.setattr(attention, "implementations", implementations)
    gate = attention.gated(step)
    name, found = next(gate)
    assert name == "flex"
    assert "no time: differs from float64" in found
    with pytest.raises(SystemExit, match="fused is wrong by nan"):
        next(gate)
