"""Chooses the pictures of a page by the facts that a run has, and draws those with bars."""

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from tasks.report_page.chart import NARROW, WIDE, Chart, Picture, element, text_width
from tasks.report_page.facts import Row, RunFacts, count_computed_prompt_tokens
from tasks.report_page.quantity import between, count, percent, seconds, short
from tasks.report_page.timeline import draw_timeline

STAGES = ("read", "tokenize", "plan", "infer", "write")
TENTHS = tuple(f"{edge * 10}%" for edge in range(11))

ROW_HEIGHT, BAR_HEIGHT, NAME_WIDTH = 34.0, 20.0, 170.0

FEWEST_PLACES = 5
"""A histogram with fewer bars leaves free space at the right instead of drawing very wide bars."""


class Part(NamedTuple):
    """A named quantity with a share: the time of a stage, or the tokens saved by a level of sharing."""

    name: str
    value: float
    share: float
    kind: str


def draw_pictures(facts: RunFacts) -> dict[str, Picture]:
    """The pictures by the slug of their figure."""
    stages = [(stage, f"{seconds(stage.value)} · {percent(stage.share)}") for stage in find_stages(facts)]
    pictures = {"stages": _draw_parts(stages)}
    if facts.bins:
        pictures |= draw_timeline(facts) | {"utilisation": _draw_utilisation(facts)}
    if facts.run.num_prompt_tokens:
        levels = [
            (each, f"{count(round(each.value))} · {percent(each.share)} saved" if each.share else count(each.value))
            for each in find_savings(facts)
        ]
        pictures["savings"] = _draw_parts(levels)
        if facts.share_degrees:
            pictures["share-degrees"] = _draw_share_degrees(facts)
        else:
            pictures["cached-shares"] = _draw_cached_shares(facts)
        pictures |= {f"{kind}-lengths": _draw_lengths(kind, bins) for kind, bins in find_lengths(facts).items()}
    return pictures


def find_stages(facts: RunFacts) -> list[Part]:
    """Wall time of each stage of the flow, and of the time between stages; where a process was killed, that of its
    steps."""
    values = {stage: getattr(facts.run, f"{stage}_seconds") for stage in STAGES}
    rest = max(facts.run.total_seconds - sum(value for value in values.values() if value is not None), 0.0)
    if values["infer"] is None and facts.totals.num_steps:
        values["infer"] = min(facts.totals.elapsed_seconds, rest)
        rest -= values["infer"]
    known = {stage: value for stage, value in values.items() if value is not None} | {"between stages": rest}
    total = sum(known.values()) or 1.0
    return [Part(stage, value, value / total, "plain") for stage, value in known.items()]


def find_savings(facts: RunFacts) -> list[Part]:
    """Prompt tokens without sharing, as planned (Eq. 2 of BatchLLM), as computed, and at best."""
    run, most = facts.run, facts.run.num_prompt_tokens
    levels = [
        ("without sharing", 0.0, "quiet"),
        ("planned (Eq. 2)", run.token_saving_ratio, "plain"),
        ("computed", 1 - count_computed_prompt_tokens(facts) / (most or 1), "suffix"),
        ("the fewest possible", run.best_token_saving_ratio, "prefix"),
    ]
    return [Part(name, most * (1 - saved), saved, kind) for name, saved, kind in levels if saved is not None]


def find_lengths(facts: RunFacts) -> dict[str, list[Row]]:
    """The bins of each kind of length, for kinds that the run has."""
    kinds: dict[str, list[Row]] = {}
    for each in facts.lengths:
        kinds.setdefault(each.kind, []).append(each)
    return {kind: bins for kind, bins in kinds.items() if any(each.high > 1 and each.num_rows for each in bins)}


def tenth(each: Row) -> str:
    """The range of a bin that covers a tenth, such as 10 to 20%."""
    return f"{each.tenth * 10} to {each.tenth * 10 + 10}%"


def _draw_parts(parts: Sequence[tuple[Part, str]]) -> Picture:
    """A horizontal bar for each part, between its name and the text of its value; the longest leaves room for it."""
    longest = max(part.value for part, _ in parts) or 1.0
    full_width = WIDE - NAME_WIDTH - 16 - max(text_width(text) for _, text in parts)
    marks = []
    for number, (part, text) in enumerate(parts):
        top = number * ROW_HEIGHT + 6
        length = part.value / longest * full_width
        middle = top + BAR_HEIGHT / 2 + 5
        marks += [
            element("text", part.name, x=NAME_WIDTH - 10, y=middle, class_="name end"),
            element("rect", x=NAME_WIDTH, y=top, width=max(length, 1.0), height=BAR_HEIGHT, rx=3, class_=part.kind),
            element("text", text, x=NAME_WIDTH + length + 8, y=middle, class_="name"),
        ]
    return Picture(WIDE, len(parts) * ROW_HEIGHT + 4, Markup("").join(marks))


class Bar(NamedTuple):
    """A bar of a histogram.

    Attributes:
        quiet: of the value, drawn in a quiet colour at the bottom.
    """

    value: float
    tip: str
    quiet: float = 0.0


def _draw_utilisation(facts: RunFacts) -> Picture:
    """A histogram of batch utilisation, weighted by the time of the steps."""
    bars = [
        Bar(
            each.seconds,
            f"{tenth(each)} full: {count(each.num_steps)} steps, {seconds(each.seconds)}",
            each.cool_down_seconds,
        )
        for each in facts.utilisation
    ]
    labels = ("tokens of the step / chunk size", "seconds")
    legend = [("plain", "time in such steps"), ("quiet", "of it in a cool-down")]
    return _draw_histogram(bars, "plain", TENTHS, labels, width=WIDE, legend=legend)


def _draw_share_degrees(facts: RunFacts) -> Picture:
    names = [between(each.low, each.high) for each in facts.share_degrees]
    bars = [
        Bar(each.num_prompts, f"degree {name}: {count(each.num_prompts)} prompts in {count(each.num_groups)} groups")
        for name, each in zip(names, facts.share_degrees, strict=True)
    ]
    return _draw_histogram(bars, "prefix", names, ("distinct prompts that share the prefix", "prompts"))


def _draw_cached_shares(facts: RunFacts) -> Picture:
    """A histogram of the share of each prompt that was computed for another row."""
    bars = [Bar(each.num_rows, f"{tenth(each)}: {count(each.num_rows)} rows") for each in facts.cached_shares]
    return _draw_histogram(bars, "prefix", TENTHS, ("cached tokens / prompt tokens", "rows"))


def _draw_lengths(kind: str, bins: Sequence[Row]) -> Picture:
    unit = "groups" if kind == "prefix" else "rows"
    bars = [
        Bar(each.num_rows, f"{between(each.low, each.high - 1)} tokens: {count(each.num_rows)} {unit}") for each in bins
    ]
    edges = [*(short(each.low) for each in bins), short(bins[-1].high)]
    return _draw_histogram(bars, "plain", edges, ("tokens", unit))


def _draw_histogram(
    bars: Sequence[Bar],
    kind: str,
    edges: Sequence[str],
    labels: tuple[str, str],
    width: float = NARROW,
    legend: Sequence[tuple[str, str]] = (),
) -> Picture:
    """Vertical bars side by side.

    Args:
        kind: CSS class of their colour.
        edges: labels of the bars' borders, one more than bars; or one label for each bar, placed below its middle, in
            up to two rows. Labels without room are left out.
        labels: what is measured on x and y, with the unit.
    """
    is_below_bars = len(edges) == len(bars)
    chart = Chart(
        max(len(bars), FEWEST_PLACES),
        max((bar.value for bar in bars), default=0.0) or 1.0,
        *labels,
        width=width,
        x_names=[(n + (0.5 if is_below_bars else 0.0), edge) for n, edge in enumerate(edges)],
        most_name_rows=2 if is_below_bars else 1,
    )
    marks = [chart.bar((n, n + 1), bar.quiet, bar.value, kind, gap=3) for n, bar in enumerate(bars)]
    marks += [chart.bar((n, n + 1), 0.0, bar.quiet, "quiet", gap=3) for n, bar in enumerate(bars)]
    marks += [chart.target((n, n + 1), bar.tip) for n, bar in enumerate(bars)]
    return chart.render(marks, legend)
