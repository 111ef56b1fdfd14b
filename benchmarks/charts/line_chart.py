"""A line chart as an SVG file; a series whose name begins with another's is drawn dashed in that one's colour."""

from collections.abc import Mapping, Sequence
from html import escape

from benchmarks.charts.svg_file import COLOURS, svg_file
from tasks.report_page.chart import Scale

WIDTH, HEIGHT = 710, 342
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 64, 44

Points = Sequence[tuple[float, float]]


def line_chart(title: str, series: Mapping[str, Points], x_label: str, y_label: str) -> str:
    """Lines through (x, y) points from 0 on, in the order given; a point is marked where a line has few."""
    x_values, y_values = zip(*(point for points in series.values() for point in points), strict=True)
    x = Scale(low=0.0, high=max(x_values), start=LEFT, end=WIDTH - RIGHT)
    y = Scale(low=0.0, high=max(y_values) * 1.05, start=HEIGHT - BOTTOM, end=TOP)
    parts = [
        f'<text x="{x.at(value):.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{value:,g}</text>'
        for value in x.ticks(9)
    ]
    for value in y.ticks():
        parts.append(f'<path d="M{LEFT} {y.at(value):.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y.at(value) + 4:.1f}" text-anchor="end">{value:,g}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(f'<text x="10" y="{TOP - 8}">{escape(y_label)}</text>')
    solid = [name for name in series if _base(name, series) == name]
    for index, name in enumerate(solid):
        left, colour = 10 + index * (WIDTH - 20) / len(solid), COLOURS[index % len(COLOURS)]
        parts.append(f'<rect x="{left:.0f}" y="24" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{left + 14:.0f}" y="33">{escape(name)}</text>')
    for name, points in series.items():
        base = _base(name, series)
        colour = COLOURS[solid.index(base) % len(COLOURS)]
        path = "M" + "L".join(f"{x.at(at):.1f} {y.at(value):.1f}" for at, value in points)
        dash = "" if base == name else ' stroke-dasharray="5 4"'
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>')
        if base == name and len(points) <= 12:
            parts += [
                f'<circle cx="{x.at(at):.1f}" cy="{y.at(value):.1f}" r="3" fill="{colour}"/>' for at, value in points
            ]
    return svg_file(title, title, parts, width=WIDTH, height=HEIGHT)


def _base(name: str, series: Mapping[str, Points]) -> str:
    return next((other for other in series if other != name and name.startswith(f"{other},")), name)
