"""What all pictures of a run over its steps have in common: cool-downs, borders of partitions, tips."""

from collections.abc import Callable, Sequence

from tasks.report_page.chart import Chart
from tasks.report_page.markup import Markup
from tasks.report_page.quantity import between, seconds
from tasks.report_page.run_facts import StepBin

MOST_BOUNDARIES = 40
"""More borders between partitions than this hide the picture."""


def draw_background(chart: Chart, bins: Sequence[StepBin], edges: Sequence[tuple[float, float]]) -> list[Markup]:
    """Cool-downs shaded, borders between partitions."""
    marks: list[Markup] = []
    begin: float | None = None
    for number, each in enumerate(bins):
        if each.is_cool_down and begin is None:
            begin = edges[number][0]
        is_last = number + 1 == len(bins) or bins[number + 1].first_partition != each.last_partition
        if begin is not None and (is_last or not bins[number + 1].is_cool_down):
            marks.append(chart.shade(begin, edges[number][1], "cool-down"))
            begin = None
    if bins[-1].last_partition - bins[0].first_partition <= MOST_BOUNDARIES:
        marks += [
            chart.boundary(edges[number + 1][0])
            for number, each in enumerate(bins[:-1])
            if bins[number + 1].last_partition != each.last_partition
        ]
    return marks


def draw_targets(
    chart: Chart, bins: Sequence[StepBin], edges: Sequence[tuple[float, float]], tip: Callable[[StepBin], str]
) -> list[Markup]:
    """What the pointer meets over each bin, with the bin's steps, their time, and `tip`."""
    return [
        chart.target(
            low,
            high,
            f"step {between(each.first_position, each.last_position)}, {seconds(each.started_seconds)}: {tip(each)}",
        )
        for each, (low, high) in zip(bins, edges, strict=True)
    ]
