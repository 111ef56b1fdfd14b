"""What shared beginnings brought: tokens saved, share degrees, lengths."""

from collections.abc import Sequence

from tasks.report_page.bars import Bar, draw_histogram, draw_rows
from tasks.report_page.facts import Row, RunFacts
from tasks.report_page.figure import Figure
from tasks.report_page.quantity import between, count, percent, short
from tasks.report_page.table import Table

LENGTHS = (
    ("prompt", "Prompt lengths", "Tokens of each answered row's whole prompt, chat template included.", "rows"),
    (
        "prefix",
        "Prefix lengths",
        "Tokens of each shared prefix, by the plan; groups without one do not count.",
        "groups",
    ),
    (
        "computed",
        "Own parts",
        "Tokens of each prompt that no other row had computed; a prefix counts for the first.",
        "rows",
    ),
    ("output", "Answer lengths", "Tokens that the model generated for each answered row.", "rows"),
)


def draw_savings(facts: RunFacts) -> Figure:
    """Prompt tokens computed, against the plan (Eq. 2 of BatchLLM) and against the optimum."""
    run, all_tokens = facts.run, facts.run.num_prompt_tokens
    levels = [("without sharing", float(all_tokens), "quiet")]
    if run.token_saving_ratio is not None:
        levels.append(("planned (Eq. 2)", all_tokens * (1 - run.token_saving_ratio), "plain"))
    computed = facts.totals.num_suffix_tokens + facts.totals.num_prefix_tokens
    levels.append(("computed", float(computed), "suffix"))
    if run.best_token_saving_ratio is not None:
        levels.append(("the fewest possible", all_tokens * (1 - run.best_token_saving_ratio), "prefix"))
    saved = [(name, value, kind, 1 - value / all_tokens) for name, value, kind in levels]
    return Figure(
        slug="savings",
        title="Prompt tokens saved",
        note="Planned: each group's prefix once. Computed: what the model did; blocks that groups have in common save "
        "more, and what a preemption lost is computed again. No sharing of beginnings needs fewer than the last.",
        chart=draw_rows(
            "savings",
            [
                Bar(
                    name=name,
                    value=value,
                    text=f"{count(round(value))} · {percent(share)} saved" if share else count(value),
                    kind=kind,
                )
                for name, value, kind, share in saved
            ],
        ),
        statement="report/run",
        table=Table(
            caption="Prompt tokens of all answered rows",
            columns=("way", "tokens", "saved"),
            rows=[(name, count(round(value)), percent(share)) for name, value, _, share in saved],
        ),
    )


def draw_share_degrees(facts: RunFacts) -> Figure:
    """Share degree of the plan's groups where the plan is there, else how much of each prompt was found computed."""
    if not facts.share_degrees:
        return draw_cached_shares(facts)
    degrees = facts.share_degrees
    num_groups = sum(each.num_groups for each in degrees)
    mean = sum(each.num_prompts for each in degrees) / num_groups
    names = [between(each.low, each.high) for each in degrees]
    return Figure(
        slug="share-degrees",
        title="Share degree",
        note=f"How many distinct prompts have the same prefix: {mean:,.1f} in the mean of {count(num_groups)} groups. "
        "Prompts that share nothing have degree 1.",
        chart=draw_histogram(
            "share-degrees",
            [
                Bar(
                    name=name,
                    value=each.num_prompts,
                    text=f"degree {name}: {count(each.num_prompts)} prompts in {count(each.num_groups)} groups",
                    kind="prefix",
                )
                for name, each in zip(names, degrees, strict=True)
            ],
            names,
            "distinct prompts that share the prefix",
            "prompts",
        ),
        statement="report/share_degrees",
        table=Table(
            caption="Prefix groups by share degree",
            columns=("degree", "groups", "distinct prompts", "rows", "prefix tokens"),
            rows=[
                (
                    name,
                    count(each.num_groups),
                    count(each.num_prompts),
                    count(each.num_rows),
                    count(each.num_prefix_tokens),
                )
                for name, each in zip(names, degrees, strict=True)
            ],
        ),
        is_wide=False,
    )


def draw_cached_shares(facts: RunFacts) -> Figure:
    """What part of each prompt had been computed for another row."""
    ranges = [f"{each.tenth * 10} to {each.tenth * 10 + 10}%" for each in facts.cached_shares]
    return Figure(
        slug="cached-shares",
        title="Part of the prompt that was shared",
        note="Of each answered row's prompt, how much had been computed for another row already.",
        chart=draw_histogram(
            "cached-shares",
            [
                Bar(name=name, value=each.num_rows, text=f"{name}: {count(each.num_rows)} rows", kind="prefix")
                for name, each in zip(ranges, facts.cached_shares, strict=True)
            ],
            [f"{edge * 10}%" for edge in range(11)],
            "cached tokens / prompt tokens",
            "rows",
        ),
        statement="report/cached_shares",
        table=Table(
            caption="Rows by the part of their prompt that was shared",
            columns=("part", "rows"),
            rows=[(name, count(each.num_rows)) for name, each in zip(ranges, facts.cached_shares, strict=True)],
        ),
        is_wide=False,
    )


def draw_lengths(facts: RunFacts) -> list[Figure]:
    """A histogram for each kind of length that the run has."""
    bins = [*facts.lengths, *facts.prefix_lengths]
    figures = []
    for kind, title, note, unit in LENGTHS:
        found = [each for each in bins if each.kind == kind]
        if any(each.high > 1 and each.num_rows for each in found):
            figures.append(_draw_length(kind, title, note, unit, found))
    return figures


def _draw_length(kind: str, title: str, note: str, unit: str, bins: Sequence[Row]) -> Figure:
    names = [between(each.low, each.high - 1) for each in bins]
    return Figure(
        slug=f"{kind}-lengths",
        title=title,
        note=note,
        chart=draw_histogram(
            f"{kind}-lengths",
            [
                Bar(name=name, value=each.num_rows, text=f"{name} tokens: {count(each.num_rows)} {unit}", kind="plain")
                for name, each in zip(names, bins, strict=True)
            ],
            [short(each.low) for each in bins] + [short(bins[-1].high)],
            "tokens",
            unit,
        ),
        statement="report/prefix_lengths" if kind == "prefix" else "report/lengths",
        table=Table(
            caption=title,
            columns=("tokens", unit),
            rows=[(name, count(each.num_rows)) for name, each in zip(names, bins, strict=True)],
        ),
        is_wide=False,
    )
