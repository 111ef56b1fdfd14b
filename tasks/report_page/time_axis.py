"""What all pictures of a run over its steps have in common: engines, cool-downs, borders of partitions, tips.

Engines that work side by side come one after the other: each has its own memory and its own chunk to fill.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

from tasks.report_page.chart import Chart
from tasks.report_page.facts import Row, RunFacts
from tasks.report_page.markup import Markup
from tasks.report_page.quantity import between, seconds

MOST_BOUNDARIES = 40
"""More borders between partitions than this hide the picture."""


def axis_label(unit: str, facts: RunFacts) -> str:
    """Of a picture over all steps."""
    return f"{unit}; the {facts.totals.num_engines} engines one after the other" if has_engines(facts) else unit


def has_engines(facts: RunFacts) -> bool:
    """Whether several engines worked side by side."""
    return bool(facts.totals.num_engines > 1)


def engine_column(facts: RunFacts) -> tuple[str, ...]:
    """The title of a column that says which engine, where there are several."""
    return ("engine",) if has_engines(facts) else ()


def engine_cell(facts: RunFacts, engine: int) -> tuple[str, ...]:
    """What stands in that column."""
    return (str(engine),) if has_engines(facts) else ()


def draw_background(chart: Chart, bins: Sequence[Row], edges: Sequence[tuple[float, float]]) -> list[Markup]:
    """Cool-downs shaded, borders between partitions and between engines."""
    marks: list[Markup] = []
    borders: list[float] = []
    begin: float | None = None
    for number, each in enumerate(bins):
        if each.is_cool_down and begin is None:
            begin = edges[number][0]
        is_last = number + 1 == len(bins) or bins[number + 1].first_partition != each.last_partition
        if begin is not None and (is_last or not bins[number + 1].is_cool_down):
            marks.append(chart.shade(begin, edges[number][1], "cool-down"))
            begin = None
    for (each, following), (low, _) in zip(pairwise(bins), edges[1:], strict=True):
        if following.engine == each.engine and following.last_partition != each.last_partition:
            borders.append(low)
    if len(borders) <= MOST_BOUNDARIES:
        marks += map(chart.boundary, borders)
    if bins[-1].engine != bins[0].engine:
        starts = [0, *(n for n in range(1, len(bins)) if bins[n].engine != bins[n - 1].engine)]
        ends = [*(edges[n][0] for n in starts[1:]), edges[-1][1]]
        marks += [
            chart.chapter(edges[n][0], end, f"engine {bins[n].engine}") for n, end in zip(starts, ends, strict=True)
        ]
    return marks


def draw_targets(
    chart: Chart,
    facts: RunFacts,
    edges: Sequence[tuple[float, float]],
    tip: Callable[[Row], str],
) -> list[Markup]:
    """What the pointer meets over each bin, with the bin's steps, their time, and `tip`."""
    return [
        chart.target(
            low,
            high,
            (f"engine {each.engine}, " if has_engines(facts) else "")
            + f"step {between(each.first_position, each.last_position)}, {seconds(each.started_seconds)}: {tip(each)}",
        )
        for each, (low, high) in zip(facts.bins, edges, strict=True)
    ]
