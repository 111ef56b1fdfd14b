"""How the run came out: errors by reason, and what had been predicted."""

from collections.abc import Callable

from tasks.report_page.facts import RunFacts
from tasks.report_page.figure import Figure
from tasks.report_page.quantity import UNKNOWN, count, seconds
from tasks.report_page.table import Table

_MEANINGS = {"invalid": "cannot be answered as it is", "error": "tried in vain, will be tried again"}


def draw_errors(facts: RunFacts) -> Figure:
    """Reasons of error rows, most frequent first."""
    return Figure(
        slug="errors",
        title="Errors by reason",
        note="Rows that differ only in what is quoted or counted have one reason. The view failed_rows lists each row.",
        statement="report/errors",
        table=Table(
            caption=f"{count(facts.run.num_errors)} rows failed",
            columns=("reason", "kind", "for example", "rows"),
            num_text_columns=3,
            rows=[
                (each.reason, _MEANINGS.get(each.finish_reason, each.finish_reason), each.example, count(each.num_rows))
                for each in facts.errors
            ],
        ),
    )


def draw_prediction(facts: RunFacts) -> Figure | None:
    """What was predicted beside what came; None where nothing was predicted that the run knows of."""
    totals = facts.totals
    actual: dict[str, tuple[str, float | None, Callable[[float | None], str]]] = {
        "num_steps": ("steps", totals.num_steps, count),
        "num_computed_tokens": ("tokens computed", facts.run.num_computed_tokens, count),
        "peak_kv_blocks": ("most KV blocks", totals.peak_kv_blocks, count),
        "num_preempted_requests": ("preempted requests", totals.num_preempted_requests, count),
        "step_seconds": ("time of all steps", totals.step_seconds, seconds),
        "elapsed_seconds": ("time of the longest engine", totals.elapsed_seconds, seconds),
        "tecd_seconds": ("TECD", totals.tecd_seconds, seconds),
    }
    if totals.num_engines == 1:
        del actual["elapsed_seconds"]  # the same as all steps
    rows = []
    for name, (title, value, as_text) in actual.items():
        predicted = facts.prediction.get(name)
        if predicted is not None and value is not None:
            ratio = f"{value / predicted:.2f}" if predicted else UNKNOWN
            rows.append((title, as_text(predicted), as_text(value), ratio))
    if not rows:
        return None
    num_simulated = facts.prediction.get("num_simulated_partitions", totals.num_partitions)
    of_all = (
        f", on {count(num_simulated)} of {count(totals.num_partitions)} partitions"
        if num_simulated < totals.num_partitions
        else ""
    )
    return Figure(
        slug="prediction",
        title="Predicted and actual",
        note=f"The prediction was simulated before the run{of_all}. A ratio above 1 is more than predicted.",
        statement="report/step_totals",
        table=Table(
            caption="Prediction against the run",
            columns=("quantity", "predicted", "actual", "actual / predicted"),
            rows=rows,
        ),
    )
