"""An evaluation as text for a terminal or for an artifact of its flow run."""

from flows.text_page import TextPage, make_table
from tasks.evaluation.evaluation import GOLD, Evaluation, Metric
from tasks.report_page.quality import interval

COLUMNS = 100


def render_evaluation(evaluation: Evaluation) -> str:
    """What was compared, and the table of metrics."""
    page = TextPage(COLUMNS)
    whose = "newest answers" if evaluation.answers == "newest" else f"answers of run {evaluation.answers}"
    others = [f"gold table {evaluation.gold}"] if evaluation.gold else []
    others += [f"run {evaluation.against}"] if evaluation.against else []
    page.console.print(f"{evaluation.workload}: {whose} against {' and '.join(others)}")
    page.console.print(
        f"{evaluation.num_gold_rows:,} rows to compare with: {evaluation.num_ok:,} answered, "
        f"{evaluation.num_errors:,} failed (against gold, what they do not answer is wrong), "
        f"{evaluation.num_unanswered:,} without an answer"
    )
    table = make_table("", ("column", "label", "metric"), ("value", "95% interval", "rows"))
    for each in evaluation.metrics:
        metric = each.metric if each.reference == GOLD else f"{each.metric} of both runs"
        value, shown = show_value(each), interval(each) or "-"
        table.add_row(each.column_name, each.label or "", metric, value, shown, f"{each.num_rows:,}")
    page.console.print(table)
    return page.text


def show_value(each: Metric) -> str:
    """The value with three decimals, or four digits from 10 on."""
    return f"{each.value:z.3f}" if abs(each.value) < 10 else f"{each.value:z.4g}"
