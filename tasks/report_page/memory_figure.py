"""KV memory over time, by who holds it."""

from tasks.report_page.chart import Chart
from tasks.report_page.facts import Row, RunFacts
from tasks.report_page.figure import Figure
from tasks.report_page.quantity import between, count
from tasks.report_page.table import Table
from tasks.report_page.time_axis import axis_label, draw_background, draw_targets, engine_cell, engine_column

SCARCE_SHARE = 0.25
"""Of the KV blocks: where a run never uses so many, its picture ends at what it uses."""

OWNERS = (
    ("prefix", "prefixes", "prefixes: shared, until their last request is answered"),
    ("kv", "requests", "requests: own parts and answers, set aside or written"),
    ("quiet", "cached", "cached: found again by chance, given up when others need it (sharing lru)"),
)
"""Class of the marks, name, legend; from the bottom up."""


def draw_kv_memory(facts: RunFacts) -> Figure:
    """KV blocks held over time, by owner, against all there are."""
    bins, total = facts.bins, facts.totals.num_kv_blocks_total or 1
    peak = max(each.max_held_kv_blocks or each.max_kv_blocks for each in bins)
    is_scarce, has_swapped = peak >= SCARCE_SHARE * total, facts.totals.peak_swapped_kv_blocks > 0
    label = f"KV blocks in use, of {count(total)}" + (" of an engine" if facts.totals.num_engines > 1 else "")
    most_shown = max(total if is_scarce else peak, facts.totals.peak_swapped_kv_blocks)
    x_label = axis_label("seconds of model time", facts)
    chart = Chart.sized("kv-memory", bins[-1].ended_seconds, most_shown, x_label, label)
    edges = [(each.started_seconds, each.ended_seconds) for each in bins]
    most = [float(each.max_kv_blocks) for each in bins]
    marks = draw_background(chart, bins, edges)
    for each, (low, high) in zip(bins, edges, strict=True):
        bottom = 0.0
        for (kind, _, _), num_blocks in zip(OWNERS, _by_owner(each), strict=True):
            marks.append(chart.bar(low, high, bottom, bottom + (num_blocks or 0), kind))
            bottom += num_blocks or 0
    is_known = any(each.prefix_kv_blocks_at_max is not None for each in bins)
    if not is_known:
        marks.append(chart.band(edges, [0.0] * len(bins), most, "kv"))
    marks.append(chart.steps(edges, most, "ink"))
    if has_swapped:
        marks.append(chart.steps(edges, [float(each.max_swapped_kv_blocks) for each in bins], "swapped"))
    if is_scarce:
        marks.append(chart.limit(total, f"all {count(total)} blocks"))
    marks += draw_targets(chart, facts, edges, _tip)
    shown = [sum(_by_owner(each)[place] or 0 for each in bins) > 0 for place in range(len(OWNERS))]
    legend = [(kind, text) for (kind, _, text), is_shown in zip(OWNERS, shown, strict=True) if is_shown]
    legend.append(("ink", "blocks in use, the most of a step"))
    if has_swapped:
        legend.append(("swapped", "swapped: beyond these, in host memory, of preempted requests"))
    block_size = facts.config.get("engine", {}).get("block_size")
    return Figure(
        slug="kv-memory",
        title="KV memory",
        note=(f"A block holds the keys and values of {block_size} tokens. " if block_size else "")
        + "Memory at its limit keeps requests waiting; memory that stays unused could let more of them run.",
        chart=chart.render(marks),
        legend=legend,
        statement="report/step_bins",
        table=Table(
            caption="KV blocks in use; by owner in the step that uses most",
            columns=(
                *("seconds", "step", "fewest", "mean", "most", "of all"),
                *(name for _, name, _ in OWNERS),
                *(["swapped"] if has_swapped else []),
                *engine_column(facts),
            ),
            rows=[
                (
                    f"{each.started_seconds:,.2f}",
                    between(each.first_position, each.last_position),
                    count(each.min_kv_blocks),
                    count(each.mean_kv_blocks),
                    count(each.max_kv_blocks),
                    f"{each.max_kv_blocks / total:.1%}",
                    *(count(num_blocks) for num_blocks in _by_owner(each)),
                    *([count(each.max_swapped_kv_blocks)] if has_swapped else []),
                    *engine_cell(facts, each.engine),
                )
                for each in bins
            ],
        ),
    )


def _by_owner(each: Row) -> tuple[int | None, int | None, int | None]:
    """Blocks in the order of `OWNERS`; None where the run did not note them."""
    return each.prefix_kv_blocks_at_max, each.request_kv_blocks_at_max, each.cached_kv_blocks_at_max


def _tip(each: Row) -> str:
    owners = [
        f"{count(num_blocks)} {name}"
        for (_, name, _), num_blocks in zip(OWNERS, _by_owner(each), strict=True)
        if num_blocks
    ]
    swapped = f"; {count(each.max_swapped_kv_blocks)} swapped" if each.max_swapped_kv_blocks else ""
    return f"{count(each.max_kv_blocks)} KV blocks" + (f": {', '.join(owners)}" if owners else "") + swapped
