"""Chooses the pictures of a page by the facts that a run has, and draws those with named bars."""

from collections.abc import Sequence
from typing import NamedTuple

from tasks.report_page.bars import Bar, draw_histogram, draw_rows
from tasks.report_page.chart import WIDE, Picture
from tasks.report_page.facts import Row, RunFacts
from tasks.report_page.quantity import between, count, percent, seconds, short
from tasks.report_page.timeline import draw_timeline

STAGES = ("read", "tokenize", "plan", "infer", "write")


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
            (
                level,
                f"{count(round(level.value))} · {percent(level.share)} saved" if level.share else count(level.value),
            )
            for level in find_savings(facts)
        ]
        pictures["savings"] = _draw_parts(levels)
        if facts.share_degrees:
            pictures["share-degrees"] = _draw_share_degrees(facts)
        else:
            pictures["cached-shares"] = _draw_cached_shares(facts)
        pictures |= {f"{kind}-lengths": _draw_lengths(kind, bins) for kind, bins in find_lengths(facts).items()}
    return pictures


def find_stages(facts: RunFacts) -> list[Part]:
    """Wall time of each stage of the flow, and of the time between stages."""
    known = {stage: value for stage in STAGES if (value := getattr(facts.run, f"{stage}_seconds")) is not None}
    known["between stages"] = max(facts.run.total_seconds - sum(known.values()), 0.0)
    total = sum(known.values()) or 1.0
    return [Part(stage, value, value / total, "plain") for stage, value in known.items()]


def find_savings(facts: RunFacts) -> list[Part]:
    """Prompt tokens without sharing, as planned (Eq. 2 of BatchLLM), as computed, and at best."""
    run, totals, most = facts.run, facts.totals, facts.run.num_prompt_tokens
    computed = most - run.num_cached_tokens if run.is_shared else totals.num_suffix_tokens + totals.num_prefix_tokens
    levels = [
        ("without sharing", 0.0, "quiet"),
        ("planned (Eq. 2)", run.token_saving_ratio, "plain"),
        ("computed", 1 - computed / (most or 1), "suffix"),
        ("the fewest possible", run.best_token_saving_ratio, "prefix"),
    ]
    return [Part(name, most * (1 - saved), saved, kind) for name, saved, kind in levels if saved is not None]


def find_lengths(facts: RunFacts) -> dict[str, list[Row]]:
    """The bins of each kind of length, for kinds that the run has."""
    kinds: dict[str, list[Row]] = {}
    for each in (*facts.lengths, *facts.prefix_lengths):
        kinds.setdefault(each.kind, []).append(each)
    return {kind: bins for kind, bins in kinds.items() if any(each.high > 1 and each.num_rows for each in bins)}


def tenth(each: Row) -> str:
    """The range of a bin that covers a tenth, such as 10 to 20%."""
    return f"{each.tenth * 10} to {each.tenth * 10 + 10}%"


def _draw_parts(parts: Sequence[tuple[Part, str]]) -> Picture:
    return draw_rows([Bar(name=each.name, value=each.value, text=text, kind=each.kind) for each, text in parts])


def _draw_utilisation(facts: RunFacts) -> Picture:
    """A histogram of batch utilisation, weighted by the time of the steps."""
    bars = [
        Bar(
            name=tenth(each),
            value=each.seconds,
            text=f"{tenth(each)} full: {count(each.num_steps)} steps, {seconds(each.seconds)}",
            kind="plain",
            part=each.cool_down_seconds,
        )
        for each in facts.utilisation
    ]
    legend = [("plain", "time in such steps"), ("quiet", "of it in a cool-down")]
    edges = [f"{edge * 10}%" for edge in range(11)]
    return draw_histogram(bars, edges, "tokens of the step / chunk size", "seconds", width=WIDE, legend=legend)


def _draw_share_degrees(facts: RunFacts) -> Picture:
    names = [between(each.low, each.high) for each in facts.share_degrees]
    bars = [
        Bar(
            name=name,
            value=each.num_prompts,
            text=f"degree {name}: {count(each.num_prompts)} prompts in {count(each.num_groups)} groups",
            kind="prefix",
        )
        for name, each in zip(names, facts.share_degrees, strict=True)
    ]
    return draw_histogram(bars, names, "distinct prompts that share the prefix", "prompts")


def _draw_cached_shares(facts: RunFacts) -> Picture:
    """A histogram of the share of each prompt that was computed for another row."""
    bars = [
        Bar(name=tenth(each), value=each.num_rows, text=f"{tenth(each)}: {count(each.num_rows)} rows", kind="prefix")
        for each in facts.cached_shares
    ]
    return draw_histogram(bars, [f"{edge * 10}%" for edge in range(11)], "cached tokens / prompt tokens", "rows")


def _draw_lengths(kind: str, bins: Sequence[Row]) -> Picture:
    unit = "groups" if kind == "prefix" else "rows"
    names = [between(each.low, each.high - 1) for each in bins]
    bars = [
        Bar(name=name, value=each.num_rows, text=f"{name} tokens: {count(each.num_rows)} {unit}", kind="plain")
        for name, each in zip(names, bins, strict=True)
    ]
    return draw_histogram(bars, [*(short(each.low) for each in bins), short(bins[-1].high)], "tokens", unit)
