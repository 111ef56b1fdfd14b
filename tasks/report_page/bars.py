"""Draws bars with names: horizontal ones for a few named quantities, vertical ones for a histogram."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tasks.report_page.chart import NARROW, WIDE, Chart, Picture, element

ROW_HEIGHT, BAR_HEIGHT, NAME_WIDTH, VALUE_WIDTH = 34.0, 20.0, 170.0, 150.0

FEWEST_PLACES = 5
"""A histogram with fewer bars leaves free space at the right instead of drawing very wide bars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar.

    Attributes:
        name: beside or below the bar.
        value: length of the bar.
        text: the value with its unit; for vertical bars, the tooltip.
        kind: CSS class of its colour.
        part: of the value, drawn in a quiet colour at the bottom of a vertical bar.
    """

    name: str
    value: float
    text: str
    kind: str
    part: float = 0.0


def draw_rows(bars: Sequence[Bar]) -> Picture:
    """Horizontal bars, each with its name on the left and its value on the right; the longest has full width."""
    longest = max((bar.value for bar in bars), default=0.0) or 1.0
    rows = []
    for number, bar in enumerate(bars):
        top = number * ROW_HEIGHT + 6
        length = bar.value / longest * (WIDE - NAME_WIDTH - VALUE_WIDTH)
        middle = top + BAR_HEIGHT / 2 + 5
        rows += [
            element("text", bar.name, x=NAME_WIDTH - 10, y=middle, class_="name end"),
            element("rect", x=NAME_WIDTH, y=top, width=max(length, 1.0), height=BAR_HEIGHT, rx=3, class_=bar.kind),
            element("text", bar.text, x=NAME_WIDTH + length + 8, y=middle, class_="name"),
        ]
    return Picture(WIDE, len(bars) * ROW_HEIGHT + 4, Markup("").join(rows))


def draw_histogram(
    bars: Sequence[Bar],
    edges: Sequence[str],
    x_label: str,
    y_label: str,
    *,
    width: float = NARROW,
    legend: Sequence[tuple[str, str]] = (),
) -> Picture:
    """Vertical bars side by side.

    Args:
        bars: from left to right.
        edges: labels of the bars' borders, one more than bars; or one label for each bar, placed below its middle, in
            up to two rows. Labels without room are left out.
        x_label, y_label: what is measured, with the unit.
    """
    is_below_bars = len(edges) == len(bars)
    chart = Chart(
        max(len(bars), FEWEST_PLACES),
        max((bar.value for bar in bars), default=0.0) or 1.0,
        x_label,
        y_label,
        width=width,
        x_names=[(n + (0.5 if is_below_bars else 0.0), edge) for n, edge in enumerate(edges)],
        most_name_rows=2 if is_below_bars else 1,
    )
    marks = [chart.bar(n, n + 1, bar.part, bar.value, bar.kind, gap=3) for n, bar in enumerate(bars)]
    marks += [chart.bar(n, n + 1, 0.0, bar.part, "quiet", gap=3) for n, bar in enumerate(bars)]
    marks += [chart.target(n, n + 1, bar.text) for n, bar in enumerate(bars)]
    return chart.render(marks, legend)
