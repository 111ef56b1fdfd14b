"""Draws a run step by step: tokens by kind, KV memory by owner, requests.

Engines that ran in parallel are drawn one after the other: each has its own memory and token budget.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

from markupsafe import Markup

from tasks.report_page.chart import Chart, Picture, Span
from tasks.report_page.facts import Row, RunFacts
from tasks.report_page.quantity import between, count, seconds

KINDS = (
    ("decode", "mean_decode_tokens", "decode: answers going on"),
    ("suffix", "mean_suffix_tokens", "suffix: prompts' own parts"),
    ("prefix", "mean_prefix_tokens", "prefix: shared once"),
    ("padding", "mean_padding_tokens", "padding: computed and thrown away"),
)
"""CSS class, column of a bin and legend, from the bottom up; the last only if prompts are padded."""

OWNERS = (
    ("prefix", "prefix_kv_blocks_at_max", "prefixes: shared, until their last request is answered"),
    ("kv", "request_kv_blocks_at_max", "requests: own parts and answers, set aside or written"),
    ("quiet", "cached_kv_blocks_at_max", "cached: found again by chance, given up when others need it (sharing lru)"),
)
"""CSS class, column of a bin (null if the run did not note it) and legend, from the bottom up."""

SCARCE_SHARE = 0.25
"""If a run never uses this share of the KV blocks, its picture ends at the most blocks that it uses."""

MOST_BOUNDARIES = 40
"""Most borders between partitions that are drawn; more would hide the picture."""

Edges = Sequence[Span]


def draw_timeline(facts: RunFacts) -> dict[str, Picture]:
    """The pictures by the slug of their figure; the run must have at least one step. Encoders have no KV memory."""
    clock = [(each.started_seconds, each.ended_seconds) for each in facts.bins]
    pictures = {"tokens": _draw_tokens(facts), "requests": _draw_requests(facts, clock)}
    if facts.totals.num_kv_blocks_total:
        pictures["kv-memory"] = _draw_kv_memory(facts, clock)
    return pictures


def _draw_tokens(facts: RunFacts) -> Picture:
    """Tokens of each step by kind, as in Fig. 2 and 6 of BatchLLM."""
    bins, chunk = facts.bins, facts.totals.max_num_batched_tokens or 1
    is_binned = bins[-1].last_position + 1 > len(bins)
    most = max(chunk, *(each.max_rows for each in bins))
    chart = Chart(bins[-1].last_position + 1, most, _x_label("step", facts), "tokens in the step")
    kinds = KINDS[: 4 if facts.totals.num_padding_tokens else 3]
    edges = [(float(each.first_position), each.last_position + 1.0) for each in bins]
    marks = _draw_background(chart, bins, edges)
    for each, span in zip(bins, edges, strict=True):
        marks += chart.stack(span, [(kind, getattr(each, column)) for kind, column, _ in kinds])
    if is_binned:
        lows, highs = [float(each.min_tokens) for each in bins], [float(each.max_tokens) for each in bins]
        marks += [chart.band(edges, lows, highs, "ink"), chart.steps(edges, lows, "ink")]
    marks.append(chart.limit(chunk, f"chunk size {count(chunk)}"))
    for each, span in zip(bins, edges, strict=True):
        if each.num_preempted_requests:
            marks.append(chart.flag(sum(span) / 2))
    marks += _draw_targets(chart, facts, edges, _tokens_tip)
    legend = [(kind, text) for kind, _, text in kinds]
    if any(each.is_cool_down for each in bins):
        legend.append(("shade", "cool-down"))
    if is_binned:
        legend.append(("ink", "fewest to most of the steps drawn as one; the line is the fewest"))
    if facts.totals.num_preempted_requests:
        legend.append(("flag", "preemption"))
    return chart.render(marks, legend)


def _draw_kv_memory(facts: RunFacts, edges: Edges) -> Picture:
    """KV blocks in use over time, by owner, and the number of all blocks."""
    bins, total = facts.bins, facts.totals.num_kv_blocks_total
    peak = max(each.max_held_kv_blocks or each.max_kv_blocks for each in bins)
    is_scarce, peak_swapped = peak >= SCARCE_SHARE * total, facts.totals.peak_swapped_kv_blocks
    label = f"KV blocks in use, of {count(total)}" + (" of an engine" if facts.totals.num_engines > 1 else "")
    most_shown = max(total if is_scarce else peak, peak_swapped)
    chart = Chart(bins[-1].ended_seconds, most_shown, _x_label("seconds of model time", facts), label)
    most = [float(each.max_kv_blocks) for each in bins]
    marks = _draw_background(chart, bins, edges)
    for each, span in zip(bins, edges, strict=True):
        marks += chart.stack(span, [(kind, getattr(each, column) or 0) for kind, column, _ in OWNERS])
    if all(each.prefix_kv_blocks_at_max is None for each in bins):
        marks.append(chart.band(edges, [0.0] * len(bins), most, "kv"))
    marks.append(chart.steps(edges, most, "ink"))
    legend = [(kind, text) for kind, column, text in OWNERS if any(getattr(each, column) for each in bins)]
    legend.append(("ink", "blocks in use, the most of a step"))
    if peak_swapped:
        marks.append(chart.steps(edges, [float(each.max_swapped_kv_blocks) for each in bins], "swapped"))
        legend.append(("swapped", "swapped: beyond these, in host memory, of preempted requests"))
    if is_scarce:
        marks.append(chart.limit(total, f"all {count(total)} blocks"))
    return chart.render(marks + _draw_targets(chart, facts, edges, _memory_tip), legend)


def _draw_requests(facts: RunFacts, edges: Edges) -> Picture:
    """Running and waiting requests over time."""
    bins = facts.bins
    most = max(max(each.max_running_requests, each.max_waiting_requests) for each in bins)
    chart = Chart(bins[-1].ended_seconds, most, _x_label("seconds of model time", facts), "requests")
    marks = _draw_background(chart, bins, edges)
    for name in ("waiting", "running"):
        values = {part: [getattr(each, f"{part}_{name}_requests") for each in bins] for part in ("min", "mean", "max")}
        marks += [chart.band(edges, values["min"], values["max"], name), chart.steps(edges, values["mean"], name)]
    marks += _draw_targets(
        chart,
        facts,
        edges,
        lambda each: f"{count(each.mean_running_requests)} running, {count(each.mean_waiting_requests)} waiting",
    )
    return chart.render(marks, [("running", "running"), ("waiting", "waiting")])


def _x_label(unit: str, facts: RunFacts) -> str:
    num_engines = facts.totals.num_engines
    return f"{unit}; the {num_engines} engines one after the other" if num_engines > 1 else unit


def _draw_background(chart: Chart, bins: Sequence[Row], edges: Edges) -> list[Markup]:
    """Shaded cool-downs, and borders between partitions and between engines."""
    marks: list[Markup] = []
    borders: list[float] = []
    begin: float | None = None
    for number, each in enumerate(bins):
        if each.is_cool_down and begin is None:
            begin = edges[number][0]
        is_last = number + 1 == len(bins) or bins[number + 1].first_partition != each.last_partition
        if begin is not None and (is_last or not bins[number + 1].is_cool_down):
            marks.append(chart.shade((begin, edges[number][1]), "cool-down"))
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
            chart.chapter((edges[n][0], end), f"engine {bins[n].engine}") for n, end in zip(starts, ends, strict=True)
        ]
    return marks


def _draw_targets(chart: Chart, facts: RunFacts, edges: Edges, tip: Callable[[Row], str]) -> list[Markup]:
    """Tooltips over each bin with its steps, their time, and `tip`."""
    targets = []
    for each, span in zip(facts.bins, edges, strict=True):
        engine = f"engine {each.engine}, " if facts.totals.num_engines > 1 else ""
        steps = f"step {between(each.first_position, each.last_position)}, {seconds(each.started_seconds)}"
        targets.append(chart.target(span, f"{engine}{steps}: {tip(each)}"))
    return targets


def _tokens_tip(each: Row) -> str:
    kinds = ", ".join(
        f"{kind} {count(num_tokens)}"
        for kind, column, _ in KINDS
        if (num_tokens := getattr(each, column)) or kind != "padding"
    )
    is_even = each.min_tokens == each.max_tokens
    spread = "" if is_even else f" ({count(each.min_tokens)} to {count(each.max_tokens)} in all)"
    lost = f", {count(each.num_preempted_requests)} preempted" if each.num_preempted_requests else ""
    return f"{kinds}{spread}{lost}"


def _memory_tip(each: Row) -> str:
    owners = [
        f"{count(num_blocks)} {text.partition(':')[0]}"
        for _, column, text in OWNERS
        if (num_blocks := getattr(each, column))
    ]
    swapped = f"; {count(each.max_swapped_kv_blocks)} swapped" if each.max_swapped_kv_blocks else ""
    return f"{count(each.max_kv_blocks)} KV blocks" + (f": {', '.join(owners)}" if owners else "") + swapped
