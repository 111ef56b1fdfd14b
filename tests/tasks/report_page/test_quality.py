"""Pictures of answers against gold rows."""

import re
from types import SimpleNamespace

import pytest

from tasks.report_page.chart import NARROW, WIDE, text_width
from tasks.report_page.quality import NAME_WIDTH, VALUE_WIDTH, draw_quality


@pytest.mark.parametrize(("low", "high"), [(-0.3, 0.7), (0.1, 0.7), (0.1, 1.4)])
def test_intervals_stay_between_names_and_values(low: float, high: float) -> None:
    metric = SimpleNamespace(column_name="topic", label=None, metric="kappa", value=0.2, low=low, high=high)
    facts = SimpleNamespace(metrics=[metric], calibration=[], confusion=[])
    marks = str(draw_quality(facts)["metrics"].content)  # type: ignore[arg-type]
    (bar,) = re.findall(r"<rect [^>]*>", marks)
    begin, width = (float(re.search(rf' {name}="([^"]+)"', bar)[1]) for name in ("x", "width"))  # type: ignore[index]
    assert begin >= NAME_WIDTH
    assert begin + width <= WIDE - VALUE_WIDTH
    (dot,) = re.findall(r'<circle [^>]*cx="([^"]+)"', marks)
    assert (float(dot) - begin) / width == pytest.approx((0.2 - low) / (high - low), abs=0.01)


@pytest.mark.parametrize("column_name", ["topic", "customer_satisfaction_with_delivery", "m" * 200])
def test_long_names_of_metrics_stay_in_the_picture(column_name: str) -> None:
    metrics = [
        SimpleNamespace(column_name=column_name, label=None, metric=metric, value=0.2, low=0.1, high=0.3)
        for metric in ("accuracy", "mean_absolute_error", "agreement with 20260102T020000-ranking-long-1a2b3c")
    ]
    marks = str(draw_quality(SimpleNamespace(metrics=metrics, calibration=[], confusion=[]))["metrics"].content)  # type: ignore[arg-type]
    names = re.findall(r'<text x="([^"]+)"[^>]* class="name end">([^<]+)', marks)
    assert len(names) == 3
    for right, name in names:
        assert float(right) - text_width(name) >= 0
        assert float(right) < WIDE - VALUE_WIDTH - 50, "there is room for the scale"
    lines = re.findall(r'<line x1="([^"]+)"', marks)
    assert {float(left) for left in lines} == {float(names[0][0]) + 12}


@pytest.mark.parametrize(("num_labels", "width"), [(2, NARROW), (3, NARROW), (4, WIDE), (12, 1330.0)])
def test_a_confusion_is_as_wide_as_its_figure(num_labels: int, width: float) -> None:
    """A picture is drawn as wide as its figure: a narrower one would have larger letters than its neighbours."""
    labels = [f"label {n}" for n in range(num_labels)]
    cells = [
        SimpleNamespace(column_name="topic", expected=expected, answer=answer, num_rows=3)
        for expected in labels
        for answer in labels
    ]
    facts = SimpleNamespace(metrics=[], calibration=[], confusion=cells)
    assert draw_quality(facts)["confusion-1"].width == width  # type: ignore[arg-type]
