"""Pictures of answers against gold rows."""

import re
from importlib.resources import files
from types import SimpleNamespace

import pytest

from tasks.report_page.chart import NARROW, WIDE, text_width
from tasks.report_page.quality import CELL_WIDTH, NAME_WIDTH, VALUE_WIDTH, draw_quality


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


@pytest.mark.parametrize("metric", ["mean_absolute_error", "mean_absolute_error with 20260102T020000-mails-1a2b3c"])
@pytest.mark.parametrize("value", [0.5, 9.0])
def test_an_error_in_the_answers_own_unit_is_not_drawn_among_shares(value: float, metric: str) -> None:
    error = SimpleNamespace(column_name="n", label=None, metric=metric, value=value, low=0.1, high=900)
    share = SimpleNamespace(column_name="topic", label=None, metric="accuracy", value=0.9, low=0.8, high=0.95)
    marks = str(draw_quality(SimpleNamespace(metrics=[error, share], calibration=[], confusion=[]))["metrics"].content)  # type: ignore[arg-type]
    assert re.findall(r'class="name end">([^<]+)', marks) == ["topic: accuracy"]
    assert "metrics" not in draw_quality(SimpleNamespace(metrics=[error], calibration=[], confusion=[]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "column_name", ["topic", "customer_satisfaction_with_delivery", "m" * 200, "\u9867\u5ba2\u6e80\u8db3\u5ea6" * 9]
)
def test_long_names_of_metrics_stay_in_the_picture(column_name: str) -> None:
    metrics = [
        SimpleNamespace(column_name=column_name, label=None, metric=metric, value=0.2, low=0.1, high=0.3)
        for metric in ("accuracy", "exact_match", "agreement with 20260102T020000-ranking-long-1a2b3c")
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


@pytest.mark.parametrize(
    "label", ["somewhat agree", "recommendation", "\u3068\u3066\u3082\u6e80\u8db3" * 4, "wmwm" * 9]
)
def test_headings_of_a_confusion_do_not_overlap(label: str) -> None:
    labels = [f"{n} {label}" for n in range(4)]
    cells = [SimpleNamespace(column_name="topic", expected=each, answer=each, num_rows=3) for each in labels]
    picture = draw_quality(SimpleNamespace(metrics=[], calibration=[], confusion=cells))["confusion-1"]  # type: ignore[arg-type]
    headings = re.findall(r'class="tick middle">([^<]+)', str(picture.content))
    assert len(headings) == 4
    assert all(text_width(heading) < CELL_WIDTH for heading in headings)
    names = re.findall(r'<text x="([^"]+)"[^>]* class="name end">([^<]+)', str(picture.content))
    assert all(float(right) >= text_width(name) for right, name in names)


@pytest.mark.parametrize("number", [0, 1], ids=["by day", "by night"])
def test_counts_of_a_confusion_can_be_read_in_both_modes(number: int) -> None:
    """The contrast of a count with its cell is at least 4.5, as WCAG asks of small text."""
    style = (files("tasks.report_page") / "page.css").read_text()
    colours = {name: re.findall(rf"--{name}: #(\w+)", style)[number] for name in ("ink", "card", "prefix", "suffix")}
    rgb = {name: [int(text[place : place + 2], 16) / 255 for place in (0, 2, 4)] for name, text in colours.items()}

    def luminance(colour: list[float]) -> float:
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    cells = [
        SimpleNamespace(column_name="topic", expected=expected, answer=answer, num_rows=num_rows)
        for expected, answer, num_rows in (("a", "a", 9), ("b", "a", 9), ("c", "c", 1), ("c", "a", 1))
    ]
    picture = draw_quality(SimpleNamespace(metrics=[], calibration=[], confusion=cells))["confusion-1"]  # type: ignore[arg-type]
    found = re.findall(r'<rect [^>]*class="(\w+)" fill-opacity="([^"]+)"', str(picture.content))
    assert [kind for kind, _ in found] == ["prefix", "suffix", "prefix", "suffix"]
    for kind, opacity in found:
        pairs = zip(rgb[kind], rgb["card"], strict=True)
        behind = [float(opacity) * front + (1 - float(opacity)) * card for front, card in pairs]
        low, high = sorted((luminance(behind), luminance(rgb["ink"])))
        assert (high + 0.05) / (low + 0.05) >= 4.5
