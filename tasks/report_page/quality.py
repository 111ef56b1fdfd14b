"""Draws the evaluation against gold rows: metrics with intervals, reliability, confusion."""

from collections.abc import Sequence
from itertools import accumulate, groupby
from operator import attrgetter

from markupsafe import Markup

from tasks.report_page.chart import HEIGHT, NARROW, TOP, WIDE, Chart, Picture, Scale, element, text_width
from tasks.report_page.facts import Row, RunFacts
from tasks.report_page.quantity import count, percent

ROW_HEIGHT, NAME_WIDTH, VALUE_WIDTH = 26.0, 250.0, 210.0
"""The names' width is the least: longer ones have more."""

MOST_LABELS = 12
"""For a column with more labels, the confusion is only shown as a table."""

CELL_WIDTH, CELL_HEIGHT, LABEL_WIDTH = 96.0, 30.0, 170.0

FAINTEST, DARKEST = 0.1, 0.48
"""Opacity of a cell with a share of 0 and of 1: a count in front of the darkest one can be read in dark mode, too."""


def draw_quality(facts: RunFacts) -> dict[str, Picture]:
    """The pictures by the slug of their figure; empty if the answers were not evaluated."""
    shares = [each for each in facts.metrics if not each.label and not each.metric.startswith("mean_absolute_error")]
    pictures = {"metrics": _draw_metrics(shares)} if shares else {}
    for number, (_, bins) in enumerate(by_column(facts.calibration), start=1):
        pictures[f"reliability-{number}"] = _draw_reliability(bins)
    for number, (_, cells) in enumerate(by_column(facts.confusion), start=1):
        labels = sorted({label for each in cells for label in (each.expected, each.answer)})
        if len(labels) <= MOST_LABELS:
            pictures[f"confusion-{number}"] = _draw_confusion(cells, labels)
    return pictures


def by_column(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """The rows grouped by column; rows of a column must be consecutive."""
    return [(column, list(of_column)) for column, of_column in groupby(rows, key=attrgetter("column_name"))]


def interval(each: Row) -> str:
    """An interval such as "0.812 to 0.934"; empty for none."""
    return "" if each.low is None or each.high is None else f"{each.low:z.3f} to {each.high:z.3f}"


def _draw_metrics(metrics: Sequence[Row]) -> Picture:
    """A dot with an interval for each metric, on a scale from 0 to 1; it reaches further if an interval does."""
    names = [_short(f"{_short(each.column_name, 265)}: {each.metric}", 437) for each in metrics]
    left = max(NAME_WIDTH, max(map(text_width, names)) + 24)
    right, height = WIDE - VALUE_WIDTH, len(metrics) * ROW_HEIGHT
    least = min(0.0, *(float(each.value if each.low is None else each.low) for each in metrics))
    most = max(1.0, *(float(each.value if each.high is None else each.high) for each in metrics))
    at = Scale(low=least, high=most, start=left, end=right).at
    marks = [element("line", x1=at(0), x2=at(0), y1=0.0, y2=height, class_="axis")] if least < 0 else []
    for number, (name, each) in enumerate(zip(names, metrics, strict=True)):
        y = number * ROW_HEIGHT + ROW_HEIGHT / 2
        text = f"{each.value:z.3f}" + (f"  ({interval(each)})" if interval(each) else "")
        marks += [
            element("text", name, x=left - 12, y=y + 4, class_="name end"),
            element("line", x1=left, x2=right, y1=y, y2=y, class_="grid"),
            element("text", text, x=right + 12, y=y + 4, class_="name"),
        ]
        if interval(each):
            low, high = at(each.low), at(each.high)
            size = {"width": max(high - low, 1.0), "height": 8.0}
            marks.append(element("rect", x=low, y=y - 4, **size, rx=4, class_="quiet"))
        marks.append(element("circle", cx=at(each.value), cy=y, r=5, class_="plain"))
    return Picture(WIDE, height + 4, Markup("").join(marks))


def _draw_reliability(bins: Sequence[Row]) -> Picture:
    """Share of right answers by confidence; on the diagonal both are equal."""
    chart = Chart(1.0, 1.0, "confidence", "share right", width=NARROW)
    marks = []
    for each in bins:
        span = (each.tenth / 10, each.tenth / 10 + 0.1)
        marks.append(chart.bar(span, 0.0, each.share_right, "prefix", gap=3))
    (x1, x2), (y1, y2) = ([scale.at(end) for end in (0.0, 1.0)] for scale in (chart.x, chart.y))
    marks.append(element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_="limit"))
    for each in bins:
        x = chart.x.at(each.tenth / 10 + 0.05)
        marks.append(element("line", x1=x, x2=x, y1=chart.y.at(each.low), y2=chart.y.at(each.high), class_="axis"))
        tip = (
            f"confidence {each.mean_confidence:.2f} in the mean of {count(each.num_rows)} rows: "
            f"{percent(each.share_right)} right ({percent(each.low)} to {percent(each.high)})"
        )
        marks.append(chart.target((each.tenth / 10, each.tenth / 10 + 0.1), tip))
    return chart.render(marks, [("prefix", "right answers, with their 95% interval")])


def _draw_confusion(cells: Sequence[Row], labels: Sequence[str]) -> Picture:
    """Expected labels from top to bottom, answered ones from left to right; darker cells are larger shares of a row."""
    expected = sorted({each.expected for each in cells})
    totals = {label: sum(each.num_rows for each in cells if each.expected == label) for label in expected}
    places = ((LABEL_WIDTH + (n + 0.5) * CELL_WIDTH, _short(label, CELL_WIDTH - 6)) for n, label in enumerate(labels))
    marks = [element("text", heading, x=x, y=TOP + 6, class_="tick middle") for x, heading in places]
    for row, label in enumerate(expected):
        y = TOP + 14 + row * CELL_HEIGHT
        marks.append(element("text", _short(label, LABEL_WIDTH - 16), x=LABEL_WIDTH - 10, y=y + 20, class_="name end"))
        for each in cells:
            if each.expected != label:
                continue
            share, x = each.num_rows / totals[label], LABEL_WIDTH + labels.index(each.answer) * CELL_WIDTH
            kind = "prefix" if each.answer == label else "suffix"
            tip = f"{label} expected, {each.answer} answered: {count(each.num_rows)} rows, {percent(share)}"
            size = {"width": CELL_WIDTH - 2, "height": CELL_HEIGHT - 2}
            opacity = FAINTEST + (DARKEST - FAINTEST) * share
            box = element("rect", x=x + 1, y=y, **size, class_=kind, fill_opacity=opacity, data_tip=tip)
            marks += [box, element("text", count(each.num_rows), x=x + CELL_WIDTH / 2, y=y + 19, class_="name middle")]
    needed = LABEL_WIDTH + len(labels) * CELL_WIDTH + 8
    width = NARROW if needed <= NARROW else max(needed, WIDE)  # of a figure's width, so that text is not scaled up
    return Picture(width, max(TOP + 20 + len(expected) * CELL_HEIGHT, HEIGHT / 3), Markup("").join(marks))


def _short(label: str, most: float) -> str:
    """The label, cut to so many pixels."""
    end = "\N{HORIZONTAL ELLIPSIS}"
    if text_width(label) <= most:
        return label
    return label[: sum(width <= most - text_width(end) for width in accumulate(map(text_width, label)))] + end
