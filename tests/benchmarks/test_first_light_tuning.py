"""The tuning stage of a GPU's first minutes: what counts as found."""

from contextlib import nullcontext
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
