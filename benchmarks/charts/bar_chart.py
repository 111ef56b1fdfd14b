"""A horizontal bar chart as an SVG file: one group of bars a workload, one bar an engine."""

from collections.abc import Mapping
from html import escape

from benchmarks.charts.svg_file import COLOURS, svg_file

LABEL_WIDTH, BAR_WIDTH, VALUE_WIDTH = 190, 430, 90
BAR_HEIGHT, GAP = 13, 12


def bar_chart(title: str, groups: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """Bars are relative to the longest of their own group, so that every group fills the width; values are written."""
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    parts, y = [], 24.0
    for index, name in enumerate(names):
        x = 10 + 118 * index
        parts.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{colours[name]}"/>')
        parts.append(f'<text x="{x + 14}" y="{y + 9}">{escape(name.removeprefix("transformers-"))}</text>')
    y += 24
    for group, bars in groups.items():
        most = max(bars.values())
        middle = y + len(bars) * BAR_HEIGHT / 2 + 4
        parts.append(f'<text x="{LABEL_WIDTH - 8}" y="{middle}" text-anchor="end">{escape(group)}</text>')
        for name, value in bars.items():
            width = BAR_WIDTH * value / most
            parts.append(
                f'<rect x="{LABEL_WIDTH}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT - 2}" '
                f'fill="{colours[name]}"/><text x="{LABEL_WIDTH + width + 5:.1f}" y="{y + 10}">{value:.3g}</text>'
            )
            y += BAR_HEIGHT
        y += GAP
    width = max(LABEL_WIDTH + BAR_WIDTH + VALUE_WIDTH, 10 + 118 * len(names))
    return svg_file(title, f"{title} ({unit})", parts, width=width, height=y)
