"""Whole batches in a GPU's first minutes: warm-up, the order of rows, and what figures are shares of."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.first_light import batches
from benchmarks.first_light.stage_run import StageRun
from benchmarks.measuring.batch import Batch
from benchmarks.measuring.timed_runs import Ceilings
from benchmarks.peers.process import PeerError
from benchmarks.peers.protocol import Work
from engine.model.model_shape import ModelShape


@pytest.mark.parametrize(("workload", "rounds"), [("case-1", (2, 1)), ("control", (1, 1))])
def test_an_engine_is_warmed_up_once_for_the_other_workloads(
    monkeypatch: pytest.MonkeyPatch, workload: str, rounds: tuple[int, int]
) -> None:
    timed: list[tuple[int, int]] = []
    monkeypatch.setattr(batches, "_timed", lambda _engine, _batch, rounds, *_: timed.append(rounds))
    stage = SimpleNamespace(measure=lambda _, part, _seconds: part())
    lab = SimpleNamespace(batches={workload: None}, model_shape=None, is_tiny=False)
    batches._measure(stage, lab, "ours", lambda: None, workload, None)  # type: ignore[arg-type]
    assert timed == [rounds]


def test_fp8_is_compared_with_products_in_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate in bf16 is half of it, and a weight has twice the bytes there."""
    timed: list[tuple[float, float]] = []

    def note(_engine: Any, _batch: Batch, _rounds: Any, shape: ModelShape, ceilings: Ceilings) -> None:
        timed.append((ceilings.matrix_flops_per_second, shape.bytes_per_weight))

    for name, found in {"_timed": note, "_profile": lambda *_: None, "fp8_tflops": lambda _: 3.0}.items():
        monkeypatch.setattr(batches, name, found)
    monkeypatch.setattr(batches.Lab, "ours", lambda *_, **__: None)
    stage = StageRun("batches", tmp_path, seconds=60, is_tiny=True)
    ceilings = Ceilings(device="", matrix_flops_per_second=1e12, copy_bytes_per_second=1e9, by_product={})
    batches._measure_fp8(stage, batches.Lab(stage), ceilings)
    assert timed == [(3e12, 1)]


@pytest.mark.parametrize(("workload", "order"), [("case-1", "shuffled"), (batches.GROUPED, "grouped")])
def test_a_server_is_also_measured_with_grouped_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workload: str, order: str
) -> None:
    assert workload in batches.WORKLOADS["server"]
    orders: list[str] = []

    def note(_engines: Any, batch: Batch, order: str, **_: Any) -> dict[str, str]:
        orders.append(order)
        return {"engine": "not timed"}

    monkeypatch.setattr(batches, "measure_batch", note)
    batch = batches.Lab(StageRun("batches", tmp_path, seconds=60, is_tiny=True)).batches[workload]
    with pytest.raises(PeerError, match="not timed"):
        batches._timed(None, batch, (0, 1), None, None)  # type: ignore[arg-type]
    assert orders == [order]


def test_transformers_is_warmed_up_with_decode_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    works: list[Work] = []
    monkeypatch.setattr(batches.ContinuousEngine, "run", lambda _, work: works.append(work))
    batches.Lab(StageRun("batches", tmp_path, seconds=60, is_tiny=True)).transformers()
    assert [work.num_output_tokens for work in works] == [8]
