"""A sample's answers and the forecast for all rows as text for a terminal or for an artifact of its flow run."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from flows.text_page import TextPage, make_table, show_duration, show_size
from tasks.forecast.sampled import Estimate, SampledForecast
from tasks.sample import AnsweredRow, Sample

MOST_CHARACTERS = 300
"""Characters after which a shown value is cut."""


def render_sample(
    workload: str, sample: Sample, rows: Sequence[AnsweredRow], forecast: SampledForecast | None, columns: int = 0
) -> str:
    """The answers and the forecast as tables.

    Args:
        sample, rows: the rows that were chosen, and their answers.
        forecast: for all rows; None if there is none.
        columns: width; 0 is the terminal's.
    """
    page = TextPage(columns)
    num_failed = sum(row.error is not None for row in rows)
    answered = f"{len(rows):,} of {sample.num_all:,} rows answered as a sample"
    page.console.print(f"{workload}: {answered}, {num_failed:,} of them failed")
    page.console.print(_list_answers(sample, rows))
    if forecast is not None:
        page.console.print(list_forecast(forecast))
    return page.text


def _list_answers(sample: Sample, rows: Sequence[AnsweredRow]) -> Table:
    keys = list(rows[0].key) if rows else []
    answers = [name for name in dict.fromkeys(name for row in rows for name in row.answer) if name != "label_logprobs"]
    has_errors = any(row.error for row in rows)
    texts = (*keys, *answers, *(["error"] if has_errors else []))
    table = make_table("", texts, ("shared by", "prompt tokens", "output tokens"))
    for row, share_degree in zip(rows, sample.share_degrees, strict=True):
        values = [*row.key.values(), *(row.answer.get(name) for name in answers)]
        values += [row.error] if has_errors else []
        counts = (share_degree, row.num_prompt_tokens, row.num_output_tokens)
        table.add_row(*map(show_value, values), *map(_count, counts))
    return table


def list_forecast(forecast: SampledForecast) -> Table:
    """The forecast for all rows, with 95% intervals."""
    table = make_table("All rows, with 95% intervals", ("", "forecast", "at least", "at most"))

    def add(name: str, estimate: Estimate, as_text: Any) -> None:
        ends = ("-" if end is None else as_text(end) for end in (estimate.low, estimate.high))
        table.add_row(name, as_text(estimate.value), *ends)

    add("prompts", Estimate(value=forecast.num_rows), _count)
    add("time of inference", forecast.seconds, show_duration)
    add("prompt tokens to compute", Estimate(value=forecast.num_prompt_tokens), _count)
    add("output tokens", forecast.num_output_tokens, _count)
    add("tokens of an answer", forecast.answer_tokens, lambda value: f"{value:,.1f}")
    add(f"KV memory, of {show_size(forecast.kv_budget_bytes)}", forecast.peak_kv_bytes, show_size)
    add("weights", Estimate(value=forecast.weight_bytes), show_size)
    add("sample's time over its simulation", forecast.speed_ratio, lambda value: f"{value:.2f}")
    return table


def show_value(value: object) -> str:
    """A value of the database in one line, long ones cut. A MAP is given as a list of pairs."""
    if isinstance(value, list) and value and all(isinstance(pair, tuple) for pair in value):
        return ", ".join(f"{show_value(key)} {show_value(item)}" for key, item in value)
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}\N{HORIZONTAL ELLIPSIS}"


_count = "{:,.0f}".format
