"""Pictures of answers against gold rows."""

import re
from types import SimpleNamespace

import pytest

from tasks.report_page.quality import NAME_WIDTH, draw_quality


@pytest.mark.parametrize("low", [-0.3, 0.1])
def test_intervals_stay_beside_their_names(low: float) -> None:
    kappa = SimpleNamespace(column_name="topic", label=None, metric="kappa", value=0.2, low=low, high=0.7)
    facts = SimpleNamespace(metrics=[kappa], calibration=[], confusion=[])
    marks = str(draw_quality(facts)["metrics"].content)  # type: ignore[arg-type]
    (bar,) = re.findall(r"<rect [^>]*>", marks)
    begin, width = (float(re.search(rf' {name}="([^"]+)"', bar)[1]) for name in ("x", "width"))  # type: ignore[index]
    assert begin >= NAME_WIDTH
    (dot,) = re.findall(r'<circle [^>]*cx="([^"]+)"', marks)
    assert (float(dot) - begin) / width == pytest.approx((0.2 - low) / (0.7 - low), abs=0.01)
