"""The frame of a chart as an SVG file: its size, its heading, its ground."""

from collections.abc import Sequence
from html import escape

COLOURS = ("#1f6f54", "#c4642d", "#4f6fa8", "#8a6fb0", "#a08b3c", "#777777")


def svg_file(title: str, heading: str, parts: Sequence[str], *, width: float, height: float) -> str:
    """Elements as a picture of this size, on white; the heading takes the first 20 units, the title is for readers."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" font-family="sans-serif" '
        f'font-size="11" role="img" aria-label="{escape(title)}">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n'
        f'<text x="10" y="16" font-size="13" font-weight="bold">{escape(heading)}</text>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )
