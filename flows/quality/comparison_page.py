"""A comparison of two prompts, or two models, as text for a terminal or for an artifact of its flow run."""

from collections.abc import Sequence

from rich.table import Table

from flows.quality.evaluation_page import show_value as show_metric
from flows.quality.sample_page import list_forecast, show_value
from flows.text_page import TextPage, make_table
from tasks.comparison.difference import PromptDiff
from tasks.comparison.paired_rows import PairedRow
from tasks.report_page.quality import interval
from tasks.sample import AnsweredRow

MOST_ROWS = 50
"""Changed rows that are shown."""


def render_comparison(found: PromptDiff, columns: int = 0) -> str:
    """Changed answers, agreement, metrics with gold rows, forecast; `columns` of 0 is the terminal's width."""
    page = TextPage(columns)
    first, second = found.names
    if not found.rows:
        return f"{second}: no rows to compare"
    changed = found.changed
    share = len(changed) / len(found.rows)
    title = f"{first} against {second}: {len(changed):,} of {len(found.rows):,} rows have another answer ({share:.1%})"
    tokens = f"{found.num_tokens_apart:,} prompt tokens computed"
    if found.num_tokens_together is not None:
        tokens = f"{found.num_tokens_together:,} prompt tokens computed in one batch; {found.num_tokens_apart:,} in two"
    page.console.print(f"{title}\n{tokens}")
    if changed:
        page.console.print(_list_changes(found, changed[:MOST_ROWS]))
    if len(changed) > MOST_ROWS:
        page.console.print(f"... and {len(changed) - MOST_ROWS:,} more\n")
    if found.agreements:
        page.console.print(_list_agreements(found))
    if found.differences:
        page.console.print(_list_differences(found))
    if found.forecast is not None:
        page.console.print(f"Answering all rows by {second}:")
        page.console.print(list_forecast(found.forecast))
    return page.text


def _list_changes(found: PromptDiff, changed: Sequence[PairedRow]) -> Table:
    table = make_table("Other answers", (*changed[0].second.key, *found.names), show_lines=True)
    for row in changed:
        table.add_row(*map(show_value, row.second.key.values()), *map(_show_answer, row))
    return table


def _show_answer(row: AnsweredRow) -> str:
    if row.error is not None:
        return f"error: {show_value(row.error)}"
    hidden = ("_logprobs", "_probabilities")
    shown = {name: value for name, value in row.answer.items() if not name.endswith(hidden)}
    if len(shown) == 1:
        return show_value(next(iter(shown.values())))
    return ", ".join(f"{name} {show_value(value)}" for name, value in shown.items())


def _list_agreements(found: PromptDiff) -> Table:
    table = make_table("Where both agree", ("column", "label", "measure"), ("value", "95% interval", "rows"))
    for each in found.agreements:
        names = (each.column_name, each.label or "", each.metric)
        table.add_row(*names, show_metric(each), interval(each) or "-", f"{each.num_rows:,}")
    return table


def _list_differences(found: PromptDiff) -> Table:
    numbers = (*found.names, "difference", "95% interval", "rows")
    table = make_table(f"Against {found.gold}", ("column", "measure"), numbers)
    for each in found.differences:
        values = (f"{each.first_value:.3f}", f"{each.second_value:.3f}", f"{each.difference:+z.3f}")
        ends = "-" if each.low is None or each.high is None else f"{each.low:+z.3f} to {each.high:+z.3f}"
        table.add_row(each.column_name, each.metric, *values, ends, f"{each.num_rows:,}")
    return table
