"""Configurations are data: complete, consistent with the kernels, and refused where they are not."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import tune
from benchmarks.data_sheet import DATA_SHEETS, estimate_costs
from benchmarks.least_squares import non_negative_least_squares
from engine.kernels import tuned
from engine.kernels.tuned import ARCHITECTURES, load_tuned


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
            assert shape.kilotoken_us >= shape.reread_kilotoken_us > 0


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
    with pytest.raises(ValueError, match=r"Launch has unknown or missing keys \['num_wraps'\]"):
        load_tuned("default", element_bits=16, head_dim=64)


def test_origin_says_measured_or_estimated() -> None:
    for architecture in ARCHITECTURES:
        origin = load_tuned(architecture, element_bits=16, head_dim=128).origin
        assert origin.startswith(("measured on", "estimated from", "chosen for tests")), origin


def test_written_costs_are_found_again_by_the_fit() -> None:
    """The fit that turns measured times into costs: exact on exact times, never negative, near on noisy ones."""
    random = np.random.default_rng(0)
    features = random.uniform(0, 100, (24, 5))
    costs = np.array([2.0, 0.0, 0.5, 3.0, 0.01])
    np.testing.assert_allclose(non_negative_least_squares(features, features @ costs), costs, atol=1e-8)
    noisy = features @ costs * random.uniform(0.98, 1.02, 24)
    found = non_negative_least_squares(features, noisy)
    assert (found >= 0).all()
    np.testing.assert_allclose(features @ found, features @ costs, rtol=0.03)


def test_estimates_grow_with_what_a_tile_moves() -> None:
    launch = load_tuned("sm_90", element_bits=16, head_dim=128).launches[0]
    sheet = DATA_SHEETS["sm_90"]
    small, large = (estimate_costs(launch, sheet, 16, head_dim).narrow for head_dim in (64, 256))
    assert large.kilotoken_us > 2 * small.kilotoken_us
    slower = replace(sheet, memory_gb_s=sheet.memory_gb_s / 4)
    assert estimate_costs(launch, slower, 16, 64).narrow.kilotoken_us > small.kilotoken_us


def test_tuning_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["tune"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="no GPU is at hand, so nothing was measured"):
        tune.main()
