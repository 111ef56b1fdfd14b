"""Charts of results as SVG files, drawn with the functions of the report page."""

import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from markupsafe import Markup

from tasks.report_page.chart import Chart, Picture, element, text_width

FOLDER = "charts"
"""Beside the page that shows them."""

COLOURS = ("#1f6f54", "#c4642d", "#4f6fa8", "#8a6fb0", "#a08b3c", "#b0486b", "#777777")
WIDTH, NAME_WIDTH, VALUE_WIDTH = 760.0, 200.0, 60.0
BAR_HEIGHT, GROUP_GAP = 15.0, 12.0
MOST_MARKED_POINTS = 12

Points = Sequence[tuple[float, float]]


def save_chart(svg: str, document: Path, name: str) -> None:
    """Write a chart where the document links to it: FOLDER/NAME, beside the document.

    Args:
        svg: the chart, see `bar_chart` and `line_chart`.
        document: the page that shows it.
        name: the file's.
    """
    folder = document.parent / FOLDER
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(svg)


def bar_chart(title: str, groups: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """Horizontal bars in groups, relative to the longest of their own group, their values beside them.

    Args:
        title: what is compared.
        groups: values by the name of their group, which stands on the left, and by their series, which has a colour.
        unit: of the values.
    """
    colours = _colours(dict.fromkeys(name for bars in groups.values() for name in bars))
    parts, y = [], 0.0
    for group, bars in groups.items():
        parts.append(element("text", group, x=NAME_WIDTH - 8, y=y + len(bars) * BAR_HEIGHT / 2 + 4, class_="end"))
        for name, value in bars.items():
            width = (WIDTH - NAME_WIDTH - VALUE_WIDTH) * value / max(bars.values())
            bar = {"x": NAME_WIDTH, "y": y, "width": width, "height": BAR_HEIGHT - 2, "fill": colours[name]}
            parts += [element("rect", **bar), element("text", f"{value:.3g}", x=NAME_WIDTH + width + 5, y=y + 11)]
            y += BAR_HEIGHT
        y += GROUP_GAP
    return _svg_file(title, f"{title} ({unit})", colours, Picture(WIDTH, y, Markup("").join(parts)))


def line_chart(title: str, series: Mapping[str, Points], x_label: str, y_label: str) -> str:
    """Lines through points from 0 on; the points of a line that has few are marked.

    Args:
        title: what is compared.
        series: points (x, y) by name. A series named "<another's name>, ..." is drawn dashed in that one's colour.
        x_label: what is measured, with its unit; so `y_label`.
    """
    bases = {name: next((base for base in series if name.startswith(f"{base},")), name) for name in series}
    colours = _colours(name for name, base in bases.items() if name == base)
    x_values, y_values = zip(*(point for points in series.values() for point in points), strict=True)
    chart = Chart(max(x_values), max(y_values), x_label, y_label, width=WIDTH)
    marks = []
    for name, points in series.items():
        colour, is_base = colours[bases[name]], bases[name] == name
        places = [(chart.x.at(x), chart.y.at(y)) for x, y in points]
        dash = {} if is_base else {"stroke_dasharray": "5 4"}
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        marks.append(element("path", d=path, fill="none", stroke=colour, stroke_width=1.6, **dash))
        if is_base and len(points) <= MOST_MARKED_POINTS:
            marks += [element("circle", cx=x, cy=y, r=3, fill=colour) for x, y in places]
    return _svg_file(title, title, colours, chart.render(marks))


def _colours(names: Iterable[str]) -> dict[str, str]:
    return {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}


def _svg_file(title: str, heading: str, colours: Mapping[str, str], picture: Picture) -> str:
    """The picture on white with heading and legend, in the page's light style."""
    css = files("tasks.report_page").joinpath("page.css").read_text("utf-8")
    values = dict(re.findall(r"(--\w+): ([^;]+);", css.partition("@media")[0]))
    rules = re.findall(r"^svg (?:text|[.](?:tick|middle|end|grid|axis))\b.*$", css, re.MULTILINE)
    style = re.sub(r"var\((--\w+)\)", lambda found: values[found[1]], "\n".join(rules))
    keys, x, y = [], 10.0, 42.0
    for name, colour in colours.items():
        name = name.removeprefix("transformers-")
        if x + text_width(name) + 15 > WIDTH:
            x, y = 10.0, y + 18
        keys.append(element("rect", x=x, y=y - 10, width=10, height=10, fill=colour))
        keys.append(element("text", name, x=x + 15, y=y))
        x += text_width(name) + 33
    top = y + 16
    content = (
        element("style", Markup(style)),
        element("rect", width="100%", height="100%", fill="white"),
        element("text", heading, x=10, y=18, font_weight="bold"),
        *keys,
        element("g", picture.content, transform=f"translate(0 {top:g})"),
    )
    attributes = {"viewBox": f"0 0 {WIDTH:g} {top + picture.height:g}", "role": "img", "aria_label": title}
    return (
        element(
            "svg", *content, xmlns="http://www.w3.org/2000/svg", font_family="DejaVu Sans, sans-serif", **attributes
        )
        + "\n"
    )
