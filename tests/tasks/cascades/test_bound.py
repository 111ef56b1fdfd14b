"""What a sample shows of a cascade, against scipy, against simulated rows, and at its edges."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.cascades.bound import choose_threshold, find_most_disagreements

stats = pytest.importorskip("scipy.stats")


@settings(max_examples=60)
@given(st.data())
def test_the_test_is_exact(data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, 3000))
    num_sampled = data.draw(st.integers(1, num_rows))
    num_allowed = data.draw(st.integers(0, num_rows - 1))
    error = data.draw(st.floats(0.001, 0.3))
    most = find_most_disagreements(num_rows, num_sampled, num_allowed, error)
    chance = stats.hypergeom(num_rows, num_allowed + 1, num_sampled)
    if most is not None:
        assert chance.cdf(most) <= error + 1e-6
    if most != num_sampled:
        assert chance.cdf(0 if most is None else most + 1) > error - 1e-6


def simulate(rng: np.random.Generator, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Confidences, and whether the models agree: for sure rows almost always, and no more than the target at best."""
    confidences = rng.beta(4, 2, num_rows).round(2)
    return confidences, rng.random(num_rows) < 0.6 + 0.4 * confidences


@pytest.mark.parametrize(("target", "confidence"), [(0.95, 0.9), (0.9, 0.8)])
def test_the_target_is_missed_no_more_often_than_said(target: float, confidence: float) -> None:
    """Simulated labels: of 300 samples of one table, as many thresholds as the confidence allows may be too low."""
    rng = np.random.default_rng(7)
    num_missed, num_useful = 0, 0
    confidences, is_same = simulate(rng, 2000)
    for _ in range(300):
        inside = np.zeros(2000, bool)
        inside[rng.choice(2000, 400, replace=False)] = True
        sample = list(zip(confidences[inside].tolist(), is_same[inside].tolist(), strict=True))
        found = choose_threshold(sample, 2000, target, confidence)
        assert found.threshold is not None
        stands = ~inside & (confidences >= found.threshold)
        num_useful += bool(stands.sum() > 100)
        num_missed += bool((stands & ~is_same).sum() > (1 - target) * 1600)
    assert num_useful > 250
    assert num_missed <= stats.binom(300, 1 - confidence).ppf(0.999)


def test_a_sample_without_a_disagreement_lets_all_answers_stand() -> None:
    found = choose_threshold([(0.5, True)] * 100, 10_000, 0.95, 0.95)
    assert (found.threshold, found.num_disagreed, found.num_allowed) == (0.0, 0, 495)


def test_rows_of_one_probability_stand_or_fall_together() -> None:
    sample = [(0.9, True)] * 80 + [(0.6, True)] * 10 + [(0.6, False)] * 10
    found = choose_threshold(sample, 10_000, 0.95, 0.95)
    assert found.num_acceptable == 1
    assert found.threshold is not None
    assert 0.6 < found.threshold < 0.600001
    assert found.num_disagreed == 0


@pytest.mark.parametrize(
    ("sample", "num_rows"),
    [
        ([(0.9, True)] * 58, 100_000),
        ([(0.9, True)] * 59, 59),
        ([(1.0, False)] * 100, 100_000),
        ([], 0),
    ],
    ids=["too few rows", "no row outside the sample", "the surest answers differ", "nothing"],
)
def test_no_answer_stands(sample: list[tuple[float, bool]], num_rows: int) -> None:
    assert choose_threshold(sample, num_rows, 0.95, 0.95).threshold is None
