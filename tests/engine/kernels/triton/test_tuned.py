"""Configurations are data: complete, consistent with the kernels, and refused where they are not."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.kernels import tune
from benchmarks.kernels.attention_batches import make_batch
from benchmarks.kernels.cost_fit import MeasuredStep, cost_errors, fit_costs
from benchmarks.kernels.data_sheet import DATA_SHEETS, START_US, estimate_costs, kilotokens_us
from benchmarks.kernels.gpu import GpuRun
from benchmarks.kernels.launch_candidates import candidates
from benchmarks.kernels.least_squares import non_negative_least_squares
from benchmarks.kernels.tuning_steps import tuning_steps
from benchmarks.measuring.wrong_answer import WrongAnswerError
from engine.kernels.triton import tuned
from engine.kernels.triton.tuned import CONFIG_FOLDER, Launch, load_tuned
from engine.kernels.triton.work_list import build_work_list
from tests.interpreting import INTERPRETING

ROOT = Path(__file__).parents[4]
ARCHITECTURES = ("sm_80", "sm_90", "gfx90a", "gfx942", "default", "interpreter")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("element_bits", [16, 32])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_every_shape_has_launches(architecture: str, element_bits: int, head_dim: int) -> None:
    found = load_tuned(architecture, element_bits=element_bits, head_dim=head_dim)
    assert found.architecture == architecture
    assert found.launches[0].wide is None
    for launch in found.launches:
        for shape in launch.shapes:
            assert shape.rows >= 16
            assert shape.rows & (shape.rows - 1) == 0
            assert shape.tokens >= 16
            assert shape.tokens & (shape.tokens - 1) == 0
            assert shape.tile_us > 0
            assert shape.kilotoken_us > 0
            assert shape.partial_us > 0
    assert found.start_us > 0
    assert found.memory_kilotoken_us > found.l2_kilotoken_us > 0


def test_an_unknown_architecture_takes_the_default() -> None:
    assert load_tuned("sm_86", element_bits=16, head_dim=128).architecture == "default"


def test_a_head_dim_beyond_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sm_90\.json: no entry for 16-bit elements and head dim 512"):
        load_tuned("sm_90", element_bits=16, head_dim=512)


def test_a_wrong_key_is_refused(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = json.loads((tuned.CONFIG_FOLDER / "default.json").read_text())
    document["entries"][0]["launches"][0]["num_wraps"] = 4
    (tmp_path / "default.json").write_text(json.dumps(document))
    monkeypatch.setattr(tuned, "CONFIG_FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"default\.json: (.*\n)+launches\.0\.num_wraps"):
        load_tuned("default", element_bits=16, head_dim=64)


def test_origin_says_measured_or_estimated() -> None:
    for architecture in ARCHITECTURES:
        origin = load_tuned(architecture, element_bits=16, head_dim=128).origin
        assert origin.startswith(("measured on", "launches measured on", "estimated from", "chosen for tests")), origin


def test_least_squares_without_negative_coefficients() -> None:
    """Exact on exact times, never negative, near on noisy ones."""
    random = np.random.default_rng(0)
    features = random.uniform(0, 100, (24, 5))
    costs = np.array([2.0, 0.0, 0.5, 3.0, 0.01])
    np.testing.assert_allclose(non_negative_least_squares(features, features @ costs), costs, atol=1e-8)
    noisy = features @ costs * random.uniform(0.98, 1.02, 24)
    found = non_negative_least_squares(features, noisy)
    assert (found >= 0).all()
    np.testing.assert_allclose(features @ found, features @ costs, rtol=0.03)


def test_costs_are_found_again_by_the_times_that_they_cause() -> None:
    """From what a data sheet says, and with five percent of noise on each time."""
    shipped = load_tuned("sm_90", element_bits=16, head_dim=128)
    random = np.random.default_rng(0)
    steps: dict[str, list[MeasuredStep]] = {launch.name: [] for launch in shipped.launches}
    for launch in shipped.launches:
        for step in tuning_steps():
            if step.is_mixed and launch.wide is None:
                continue
            for policy in ("paged", "relay")[: 1 + step.has_prefix_tiles]:
                work_list = build_work_list(
                    make_batch(step.groups, 16)[0], replace(shipped, launches=(launch,)), group_size=4, num_kv_heads=8,
                    policy=policy,
                )  # fmt: skip
                found = MeasuredStep.of(work_list, num_kv_heads=8, num_processors=132, us=1.0)
                error = cost_errors(shipped, launch, [found])[0]
                steps[launch.name].append(replace(found, us=(1 + error) * random.uniform(0.95, 1.05)))
    sheet = DATA_SHEETS["sm_90"]
    expected = [estimate_costs(launch, sheet, 16, 128) for launch in shipped.launches]
    fitted, device = fit_costs(expected, list(steps.values()), (START_US, *kilotokens_us(sheet, 16, 128)))
    names = ("start_us", "memory_kilotoken_us", "l2_kilotoken_us")
    found_again = replace(shipped, **dict(zip(names, device, strict=True)))
    errors = [error for launch in fitted for error in cost_errors(found_again, launch, steps[launch.name])]
    assert float(np.abs(errors).mean()) < 0.05
    np.testing.assert_allclose(device, [getattr(shipped, name) for name in names], rtol=0.2)
    for launch, before in zip(fitted, shipped.launches, strict=True):
        assert replace(launch, narrow=before.narrow, wide=before.wide) == before
        np.testing.assert_allclose(launch.narrow.kilotoken_us, before.narrow.kilotoken_us, rtol=0.15)


def test_estimates_grow_with_what_a_tile_moves() -> None:
    launch = load_tuned("sm_90", element_bits=16, head_dim=128).launches[0]
    sheet = DATA_SHEETS["sm_90"]
    small, large = (estimate_costs(launch, sheet, 16, head_dim).narrow for head_dim in (64, 256))
    assert large.kilotoken_us > 2 * small.kilotoken_us
    slower = replace(sheet, memory_gb_s=sheet.memory_gb_s / 4)
    assert kilotokens_us(slower, 16, 64)[0] == pytest.approx(4 * kilotokens_us(sheet, 16, 64)[0], rel=1e-3)


def test_tuning_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="no GPU is at hand, so nothing was measured"):
        tune.main([])


class Bench:
    """Measures nothing: fewer warps are faster, and with 4 stages a launch is wrong."""

    step = MeasuredStep(
        tiles=np.ones((1, 3)),
        longest=np.ones((1, 1, 3)),
        num_fresh=9,
        num_reread=9,
        num_kv_heads=1,
        num_slots=1,
        us=1.0,
    )

    not_captured = ""

    def __init__(self, run: GpuRun, dtype: torch.dtype, head_dim: int) -> None:
        pass

    def measure(self, launch: Launch) -> list[MeasuredStep]:
        if launch.num_stages == 4:
            raise WrongAnswerError("fused is wrong by 1.5")
        counts = np.ones((len(launch.shapes), 3))
        us = 100.0 * launch.num_warps + launch.num_stages
        return [replace(self.step, tiles=counts, longest=counts[None], us=us)]


@contextmanager
def compiled_already(launches: Sequence[Launch], *_: object) -> Iterator[list[Future[Launch]]]:
    futures = [Future() for _ in launches]
    for future, launch in zip(futures, launches, strict=True):
        future.set_result(launch)
    yield futures


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A GPU on which every candidate fits and nothing needs time; the folder holds what is shipped for it."""
    run = GpuRun(device=torch.device("cpu"), hardware="a GPU", versions="1", commit="abc", num_processors=7)
    monkeypatch.setattr(tune, "require_gpu", lambda _: run)
    monkeypatch.setattr(tune, "architecture_of", lambda _: "sm_90")
    monkeypatch.setattr(tune, "compiled_ahead", compiled_already)
    monkeypatch.setattr(tune, "TuningBench", Bench)
    monkeypatch.setattr(tuned, "CONFIG_FOLDER", tmp_path)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    (tmp_path / "sm_90.json").write_text((CONFIG_FOLDER / "sm_90.json").read_text())
    yield tmp_path
    os.environ.pop("TRITON_CACHE_DIR", None)


def test_a_measured_entry_replaces_its_own_and_a_wrong_candidate_is_named(
    gpu: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = json.loads((gpu / "sm_90.json").read_text())
    assert tune.main(["--folder", str(gpu), "--bits", "16", "--head-dim", "64"]) == 1  # since some were wrong
    error = capsys.readouterr().err
    assert "sm_90 16-bit 64 decode 16x64, 4 warps, 4 stages: WrongAnswerError: fused is wrong by 1.5" in error
    found = load_tuned("sm_90", element_bits=16, head_dim=64)
    assert found.origin == "measured on a GPU with 1, commit abc"
    assert found.num_processors == 7
    best = [(launch.name, launch.num_warps, launch.num_stages) for launch in found.launches]
    assert best == [("decode", 2, 2), ("grouped", 4, 2), ("mixed", 4, 2)]
    assert found.start_us > START_US  # the steps took more than expected
    after = json.loads((gpu / "sm_90.json").read_text())
    assert after["entries"][1:] == before["entries"][1:]
    assert after | {"entries": []} == before | {"entries": []}


def test_a_search_that_has_to_end_keeps_the_best_of_each_kind(
    gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every look at the clock takes a second."""
    monkeypatch.setattr(tune, "time", SimpleNamespace(monotonic=count().__next__))
    arguments = ["--folder", str(gpu), "--bits", "16", "--head-dim", "128", "--seconds", "6.2"]
    assert tune.main(arguments) == 0
    found = load_tuned("sm_90", element_bits=16, head_dim=128)
    num_candidates = len(list(candidates("sm_90", 16, 128)))
    assert found.origin == f"measured on a GPU with 1, commit abc; 5 of {num_candidates} candidates"
    best = [(launch.name, launch.num_stages) for launch in found.launches]
    assert best == [("decode", 2), ("grouped", 2), ("mixed", 3)]
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("not tried: sm_90 16-bit 128 ")]) == num_candidates - 5


def test_what_was_not_found_stays_as_it_was(gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (gpu / "sm_90.json").read_text()
    assert tune.main(["--folder", str(gpu), "--bits", "32", "--head-dim", "64", "256", "--seconds", "0"]) == 1
    assert "sm_90 32-bit 256 stays as it was: found only nothing" in capsys.readouterr().err
    assert (gpu / "sm_90.json").read_text() == before


BENCH_PROGRAM = """
import torch
from benchmarks.kernels import tuning_steps
from benchmarks.kernels.attention_batches import GroupSize
from benchmarks.kernels.gpu import DeviceTime, GpuRun
from benchmarks.kernels.tuning_steps import TuningStep
from benchmarks.measuring.wrong_answer import WrongAnswerError
from engine.kernels.triton.tuned import load_tuned

def steps():
    yield TuningStep(groups=[GroupSize(prefix_len=0, members=[(17, 1)])])
    yield TuningStep(groups=[GroupSize(prefix_len=33, members=[(5, 1), (6, 1)])], has_prefix_tiles=True)
    yield TuningStep(groups=[GroupSize(prefix_len=0, members=[(20, 20)])], is_mixed=True)

def device_time(call, *, rep_ms):
    call()
    return DeviceTime(us=3.0, not_captured="")

references = []
def reference(*arguments, **settings):
    references.append(1)
    return real(*arguments, **settings)

real, tuning_steps.paged_attention_ref = tuning_steps.paged_attention_ref, reference
tuning_steps.tuning_steps, tuning_steps.device_time = steps, device_time
run = GpuRun(device=torch.device("cpu"), hardware="", versions="", commit="", num_processors=4)
bench = tuning_steps.TuningBench(run, torch.float32, 64)
decode, mixed = load_tuned("interpreter", element_bits=32, head_dim=64).launches
for launch, num_times in ((decode, 3), (mixed, 4)):
    found = bench.measure(launch)
    assert [step.us for step in found] == [3.0] * num_times, found
    assert all(step.tiles.shape == (len(launch.shapes), 3) for step in found)
assert len(references) == 3, references  # once a step, whatever the number of launches
bench._expected[0] += 1
try:
    bench.measure(decode)
except WrongAnswerError as error:
    print(error)
"""


@pytest.mark.slow
def test_the_bench_compares_before_it_measures() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BENCH_PROGRAM],
        cwd=ROOT, env=os.environ | INTERPRETING, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("paged is wrong by ")
