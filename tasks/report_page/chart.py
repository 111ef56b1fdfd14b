"""Draws charts as SVG: the axes and the marks in them."""

import math
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup, escape

from tasks.report_page.quantity import short

LEFT, RIGHT, TOP, BOTTOM = 64.0, 14.0, 22.0, 44.0
WIDE, NARROW = 960.0, 470.0
HEIGHT = 270.0
LABEL_HEIGHT = 16.0

Span = tuple[float, float]
"""A range of x, from the lower to the higher value."""

NARROW_CHARACTERS, WIDE_CHARACTERS = frozenset(" .,:;'()|!fijlrtI"), frozenset("%mwMW@")


def element(tag: str, *children: str, **attributes: str | float) -> Markup:
    """An SVG element; children that are not `Markup` are escaped. In attribute names ``_`` becomes ``-``, and one at
    the end is dropped (``class_``). Floats keep two decimals."""
    start = tag
    for name, value in attributes.items():
        text = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else escape(value)
        start += f' {name.rstrip("_").replace("_", "-")}="{text}"'
    return Markup(f"<{start}>{Markup('').join(children)}</{tag}>")


def text_width(text: str) -> float:
    """Most pixels of a label in 12 pixel DejaVu Sans, the widest of the page's fonts."""
    return sum(map(_width, text))


def _width(character: str) -> float:
    if unicodedata.east_asian_width(character) in "WF":  # of Chinese, Japanese and Korean scripts, and emoji
        return 12.5
    return 5.0 if character in NARROW_CHARACTERS else 11.8 if character in WIDE_CHARACTERS else 7.8


def place_labels(labels: Sequence[tuple[float, str]], most_rows: int) -> list[tuple[float, str, int]]:
    """Choose labels that do not overlap, as (pixel, text, row below the axis); each is centred on its pixel. All are
    shown, in as few rows as possible; if they do not fit, every second, every third and so on."""
    for every in range(1, len(labels) + 1):
        shown = labels[::every]
        for num_rows in range(1, most_rows + 1):
            in_one_row = zip(shown, shown[num_rows:], strict=False)
            if all(right - left > (text_width(a) + text_width(b)) / 2 + 6 for (left, a), (right, b) in in_one_row):
                return [(x, text, number % num_rows) for number, (x, text) in enumerate(shown)]
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Maps values from `low` to `high`, which is larger, to pixels from `start` to `end`, which may be smaller."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """The pixel of a value; values outside of the scale are extrapolated."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, most: int) -> list[float]:
        """At most `most` round values of the scale: multiples of 1, 2 or 5 times a power of ten."""
        raw = (self.high - self.low) / (most - 1)
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= raw * (1 - 1e-9))
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(number * step, 12) for number in range(first, last + 1)]


class Picture(NamedTuple):
    """The content of an SVG picture, without the outer element.

    Attributes:
        legend: pairs of CSS class and description of marks.
    """

    width: float
    height: float
    content: Markup
    legend: Sequence[tuple[str, str]] = ()


class Chart:
    """A chart with two axes that begin at 0, and its marks. Each `span`, and each of `edges`, has a left and a right
    end on x; `bottom` and `top`, `values`, `lows` and `highs` are values on y; `kind` is a mark's CSS class."""

    def __init__(
        self,
        x_high: float,
        y_high: float,
        x_label: str,
        y_label: str,
        *,
        width: float = WIDE,
        x_names: Sequence[tuple[float, str]] = (),
        most_name_rows: int = 1,
    ) -> None:
        """A chart for values up to `x_high` and `y_high`, with some room above.

        Args:
            x_label, y_label: what is measured, with the unit.
            x_names: labels below the axis, with their places on x, instead of round values; those that fit are shown.
            most_name_rows: most rows of these labels.
        """
        self.x = Scale(low=0.0, high=max(x_high, 1e-9), start=LEFT, end=width - RIGHT)
        self.y = Scale(low=0.0, high=max(y_high, 1e-9) * 1.06, start=HEIGHT - BOTTOM, end=TOP)
        self._x_label, self._y_label, self._width = x_label, y_label, width
        self._x_names, self._most_name_rows = x_names, most_name_rows

    def render(self, marks: Iterable[Markup], legend: Sequence[tuple[str, str]] = ()) -> Picture:
        """The picture with marks; later marks cover earlier ones."""
        width, bottom = self._width, self.y.start
        ticks = [self._y_tick(value) for value in self.y.ticks(5)]
        names = self._x_names or [(value, short(value)) for value in self.x.ticks(5 if width == NARROW else 9)]
        places = [(min(self.x.at(value), width - text_width(text) / 2), text) for value, text in names]
        labels = place_labels(places, self._most_name_rows)
        height = HEIGHT + LABEL_HEIGHT * max((row for _, _, row in labels), default=0)
        ticks += [
            element("text", text, x=x, y=bottom + 19 + LABEL_HEIGHT * row, class_="tick middle")
            for x, text, row in labels
        ]
        axes = (
            element("line", x1=self.x.start, x2=self.x.end, y1=bottom, y2=bottom, class_="axis"),
            element("text", self._x_label, x=(self.x.start + self.x.end) / 2, y=height - 6, class_="label middle"),
            element("text", self._y_label, x=4, y=11, class_="label"),
        )
        return Picture(width, height, Markup("").join((*ticks, *marks, *axes)), legend)

    def bar(self, span: Span, bottom: float, top: float, kind: str, gap: float = 0.0) -> Markup:
        """A bar, with `gap` free pixels between neighbouring ones; nothing if it has no height. See `Chart`."""
        if top <= bottom:
            return Markup("")
        left, right = self.x.at(span[0]) + gap / 2, self.x.at(span[1]) - gap / 2
        height = self.y.at(bottom) - self.y.at(top)
        return element("rect", x=left, y=self.y.at(top), width=max(right - left, 0.5), height=height, class_=kind)

    def stack(self, span: Span, parts: Iterable[tuple[str, float]]) -> Iterator[Markup]:
        """Bars on top of each other, of which `parts` gives CSS class and height, from the bottom up."""
        bottom = 0.0
        for kind, size in parts:
            yield self.bar(span, bottom, bottom + size, kind)
            bottom += size

    def steps(self, edges: Sequence[Span], values: Sequence[float], kind: str) -> Markup:
        """A step line: level at each value from its left to its right edge. See `Chart`."""
        return element("path", d=self._path(edges, values), class_=f"line {kind}")

    def band(self, edges: Sequence[Span], lows: Sequence[float], highs: Sequence[float], kind: str) -> Markup:
        """The area between two step lines. See `Chart`."""
        back = [(right, left) for left, right in reversed(edges)]
        path = f"{self._path(edges, highs)}L{self._path(back, lows[::-1])[1:]}Z"
        return element("path", d=path, class_=f"band {kind}")

    def limit(self, value: float, text: str) -> Markup:
        """A horizontal line for an upper limit, with a label above the plot, where no other label is."""
        y = self.y.at(value)
        return element(
            "g",
            element("line", x1=self.x.start, x2=self.x.end, y1=y, y2=y, class_="limit"),
            element("text", text, x=self.x.end, y=11, class_="tick end"),
        )

    def shade(self, span: Span, text: str) -> Markup:
        """A shaded range of x, with its name if there is room."""
        left, right = map(self.x.at, span)
        label = element("text", text, x=(left + right) / 2, y=TOP + 34, class_="tick middle")
        return element("g", self._area(span, class_="shade"), label if right - left > text_width(text) else "")

    def boundary(self, value: float, kind: str = "boundary") -> Markup:
        """A vertical line, such as between two partitions."""
        x = self.x.at(value)
        return element("line", x1=x, x2=x, y1=TOP, y2=self.y.start, class_=kind)

    def chapter(self, span: Span, text: str) -> Markup:
        """A vertical line at the beginning of a section, with the section's name if there is room."""
        left, right = map(self.x.at, span)
        shown = text if right - left >= text_width(text) + 8 else ""
        name = element("text", shown, x=left + 4, y=TOP + 20, class_="tick")
        return element("g", self.boundary(span[0], "axis"), name)

    def flag(self, value: float) -> Markup:
        """A small triangle above the plot, for an event."""
        x = self.x.at(value)
        return element("path", d=f"M{x - 4:.2f} {TOP - 7:g}H{x + 4:.2f}L{x:.2f} {TOP - 1:g}Z", class_="flag")

    def target(self, span: Span, tip: str) -> Markup:
        """An invisible area of full height over a range of x, with a tooltip."""
        return self._area(span, class_="target", data_tip=tip)

    def _area(self, span: Span, **attributes: str) -> Markup:
        """A rectangle of full height over a range of x."""
        left, right = map(self.x.at, span)
        return element("rect", x=left, y=TOP, width=right - left, height=self.y.start - TOP, **attributes)

    def _path(self, edges: Sequence[Span], values: Sequence[float]) -> str:
        points = zip(edges, values, strict=True)
        return "M" + "L".join(
            f"{self.x.at(left):.2f} {self.y.at(value):.2f}H{self.x.at(right):.2f}" for (left, right), value in points
        )

    def _y_tick(self, value: float) -> Markup:
        y = self.y.at(value)
        return element(
            "g",
            element("line", x1=self.x.start, x2=self.x.end, y1=y, y2=y, class_="grid"),
            element("text", short(value), x=self.x.start - 8, y=y + 4, class_="tick end"),
        )
