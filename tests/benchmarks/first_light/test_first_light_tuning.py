"""The tuning stage of a GPU's first minutes: what counts as found."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.first_light import tuning
from benchmarks.first_light.stage_run import StageRun
from benchmarks.kernels import tune


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StageRun:
    """A stage on the CPU that takes its device for an H100 or H200."""
    for module in (tuning, tune):
        monkeypatch.setattr(module, "architecture_of", lambda _: "sm_90")
    return StageRun("tuning", tmp_path, seconds=60, is_tiny=True)


def test_a_search_that_tried_nothing_has_failed(stage: StageRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped entry, which an H200 has measured, is not this run's."""
    monkeypatch.setattr(tune, "compiled_ahead", lambda *_: nullcontext([]))
    message = "no launch was measured: sm_90 16-bit 128 stays as it was: found only nothing"
    with pytest.raises(RuntimeError, match=message):
        tuning._tune(stage, 16, 128, seconds=0.0)


@pytest.mark.parametrize(("hardware", "is_searched"), [("NVIDIA H200", False), ("NVIDIA H100", True)])
def test_launches_that_the_device_has_measured_are_not_searched_again(
    stage: StageRun, monkeypatch: pytest.MonkeyPatch, hardware: str, is_searched: bool
) -> None:
    """Later stages measure what ships; the cost model's error is measured in any case."""
    versions = "torch 2.11.0+cu130, triton 3.6.0, Python 3.12.3"  # of the shipped entries
    stage.run = replace(stage.run, hardware=hardware, versions=versions)
    stage.is_tiny = False
    measured: list[str] = []
    monkeypatch.setattr(stage, "measure", lambda name, _: measured.append(name))
    tuning.run(stage)
    sizes = [f"{bits}-bit {head_dim}" for bits, head_dim in tuning.SIZES]
    assert [name for name in measured if name.startswith("cost model")] == [f"cost model, {size}" for size in sizes]
    searched = [name for name in measured if name.startswith("launches")]
    assert searched == ([f"launches, {size}" for size in sizes] if is_searched else [])
