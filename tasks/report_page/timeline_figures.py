"""The run step by step: tokens by kind, requests; KV memory is in `memory_figure`."""

from tasks.report_page.chart import Chart
from tasks.report_page.facts import Row, RunFacts
from tasks.report_page.figure import Figure
from tasks.report_page.memory_figure import draw_kv_memory
from tasks.report_page.quantity import between, count
from tasks.report_page.table import Table
from tasks.report_page.time_axis import axis_label, draw_background, draw_targets, engine_cell, engine_column

KINDS = (
    ("decode", "decode: answers going on"),
    ("suffix", "suffix: prompts' own parts"),
    ("prefix", "prefix: shared once"),
    ("padding", "padding: computed and thrown away"),
)
"""Class of the marks, legend; from the bottom up. The last is there where prompts are padded."""


def draw_timeline(facts: RunFacts) -> list[Figure]:
    """The figures of a run that had at least one step."""
    return [draw_tokens(facts), draw_kv_memory(facts), draw_requests(facts)]


def draw_tokens(facts: RunFacts) -> Figure:
    """Tokens of each step by kind, as in Fig. 2 and 6 of BatchLLM."""
    bins, chunk = facts.bins, facts.totals.max_num_batched_tokens or 1
    is_binned = bins[-1].last_position + 1 > len(bins)
    most = max(chunk, *(each.max_rows for each in bins))
    label = axis_label("step", facts)
    chart = Chart.sized("tokens", bins[-1].last_position + 1, most, label, "tokens in the step")
    kinds = KINDS[: 4 if facts.totals.num_padding_tokens else 3]
    edges = [(float(each.first_position), each.last_position + 1.0) for each in bins]
    marks = draw_background(chart, bins, edges)
    for each, (low, high) in zip(bins, edges, strict=True):
        bottom = 0.0
        for (kind, _), num_tokens in zip(kinds, _counts(each), strict=False):
            marks.append(chart.bar(low, high, bottom, bottom + num_tokens, kind))
            bottom += num_tokens
    if is_binned:
        lows, highs = [float(each.min_tokens) for each in bins], [float(each.max_tokens) for each in bins]
        marks += [chart.band(edges, lows, highs, "ink"), chart.steps(edges, lows, "ink")]
    marks.append(chart.limit(chunk, f"chunk size {count(chunk)}"))
    marks += [
        chart.flag((low + high) / 2)
        for each, (low, high) in zip(bins, edges, strict=True)
        if each.num_preempted_requests
    ]
    marks += draw_targets(chart, facts, edges, _tokens_tip)
    legend = list(kinds)
    if any(each.is_cool_down for each in bins):
        legend.append(("shade", "cool-down"))
    if is_binned:
        legend.append(("ink", "fewest to most of the steps drawn as one; the line is the fewest"))
    if facts.totals.num_preempted_requests:
        legend.append(("flag", "preemption"))
    return Figure(
        slug="tokens",
        title="Tokens per step",
        note="Steps should reach the chunk size; a valley is a step that did not, though there was work. "
        "In the cool-down of a partition nothing is left to fill a step with.",
        chart=chart.render(marks),
        legend=legend,
        statement="report/step_bins",
        table=Table(
            caption="Tokens per step, by kind",
            columns=(
                "step",
                *(kind for kind, _ in kinds),
                "fewest in all",
                "most in all",
                "preempted",
                "cool-down",
                *engine_column(facts),
            ),
            rows=[
                (
                    between(each.first_position, each.last_position),
                    *(count(num_tokens) for num_tokens in _counts(each)[: len(kinds)]),
                    count(each.min_tokens),
                    count(each.max_tokens),
                    count(each.num_preempted_requests),
                    "yes" if each.is_cool_down else "no",
                    *engine_cell(facts, each.engine),
                )
                for each in bins
            ],
        ),
    )


def draw_requests(facts: RunFacts) -> Figure:
    """Requests that run and that wait, over time."""
    bins = facts.bins
    most = max(max(each.max_running_requests, each.max_waiting_requests) for each in bins)
    label = axis_label("seconds of model time", facts)
    chart = Chart.sized("requests", bins[-1].ended_seconds, most, label, "requests")
    edges = [(each.started_seconds, each.ended_seconds) for each in bins]
    marks = draw_background(chart, bins, edges)
    for name in ("waiting", "running"):
        values = {part: [getattr(each, f"{part}_{name}_requests") for each in bins] for part in ("min", "mean", "max")}
        marks += [chart.band(edges, values["min"], values["max"], name), chart.steps(edges, values["mean"], name)]
    marks += draw_targets(
        chart,
        facts,
        edges,
        lambda each: f"{count(each.mean_running_requests)} running, {count(each.mean_waiting_requests)} waiting",
    )
    return Figure(
        slug="requests",
        title="Requests running and waiting",
        note="At the end of each step. A request with KV memory runs; before, and after a preemption, it waits.",
        chart=chart.render(marks),
        legend=[("running", "running"), ("waiting", "waiting")],
        statement="report/step_bins",
        table=Table(
            caption="Requests running and waiting, means of the steps",
            columns=("seconds", "step", "running", "waiting", "preempted", *engine_column(facts)),
            rows=[
                (
                    f"{each.started_seconds:,.2f}",
                    between(each.first_position, each.last_position),
                    count(each.mean_running_requests),
                    count(each.mean_waiting_requests),
                    count(each.num_preempted_requests),
                    *engine_cell(facts, each.engine),
                )
                for each in bins
            ],
        ),
    )


def _counts(each: Row) -> tuple[float, float, float, float]:
    """Tokens in the order of `KINDS`."""
    return each.mean_decode_tokens, each.mean_suffix_tokens, each.mean_prefix_tokens, each.mean_padding_tokens


def _tokens_tip(each: Row) -> str:
    kinds = ", ".join(
        f"{kind} {count(num_tokens)}"
        for (kind, _), num_tokens in zip(KINDS, _counts(each), strict=True)
        if num_tokens or kind != "padding"
    )
    spread = (
        "" if each.min_tokens == each.max_tokens else f" ({count(each.min_tokens)} to {count(each.max_tokens)} in all)"
    )
    lost = f", {count(each.num_preempted_requests)} preempted" if each.num_preempted_requests else ""
    return f"{kinds}{spread}{lost}"
