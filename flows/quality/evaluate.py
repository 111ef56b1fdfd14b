"""Compare answers with gold rows: `batchloom evaluate --database X --workload W --gold TABLE --min accuracy=0.9`.

DuckDB answers + gold rows --evaluate--> evaluated rows, metrics, views --report--> page of the run
"""

import logging
import sys
from pathlib import Path
from typing import Annotated

from prefect import flow
from pydantic import Field

from engine.errors import QualityError
from flows.command.run_flow import prepare_console, run_flow
from flows.quality.evaluation_page import render_evaluation
from flows.report import report_run
from flows.text_page import publish_page
from tasks.evaluation.evaluation import Evaluation, bind_to_answers, evaluate_answers
from tasks.evaluation.threshold import Threshold
from tasks.workloads.workload import load_workload

LOGGER = logging.getLogger("batchloom")

prepare_console()


@flow(name="evaluate", flow_run_name="evaluate-{database.stem}-{workload}", retries=0, persist_result=False)
def evaluate(
    database: Path,
    workload: str,
    gold: str | None = None,
    run: str | None = None,
    against: str | None = None,
    min: tuple[str, ...] = (),
    max: tuple[str, ...] = (),
    k: Annotated[int, Field(ge=1)] = 10,
    lock_timeout_seconds: Annotated[float, Field(ge=0)] = 30.0,
) -> Evaluation:
    """Measure the answers of a workload with gold rows or another run, with confidence intervals.

    Every compared row and every metric is kept in the database, see docs/evaluation.md. The report of the run that gave
    the answers shows them.

    Args:
        database: DuckDB file with the answers and the gold rows.
        workload: the name of a shipped workload or the path of a TOML file.
        gold: table or view with the workload's key columns and the expected values, named as the answer columns.
        run: the run whose answers are compared; the newest answer of each row if not given.
        against: another run, to measure the agreement of the two.
        min: METRIC=VALUE, COLUMN.METRIC=VALUE or COLUMN.METRIC.LABEL=VALUE; fails if the metric is below the value.
        max: as min, for a metric that should be small, such as ece; fails if it is above the value.
        k: length of the ranked lists for nDCG.
        lock_timeout_seconds: seconds to wait while another process has the database open.

    Returns:
        what was compared, and all metrics.
    Raises:
        QualityError: a metric is below its min or above its max; all metrics are in the database.
        BatchloomError: a parameter is wrong; the message says what and where.
    """
    thresholds = [Threshold.parse(text, is_least=True) for text in min]
    thresholds += [Threshold.parse(text, is_least=False) for text in max]
    loaded = bind_to_answers(database, load_workload(workload), run, lock_timeout_seconds=lock_timeout_seconds)
    evaluation = evaluate_answers(
        database, loaded, gold, run_id=run, against=against, k=k, lock_timeout_seconds=lock_timeout_seconds
    )
    page = render_evaluation(evaluation)
    LOGGER.info("%s", page)
    publish_page("evaluation", loaded.name, page, f"{loaded.name}: answers against {gold or against}")
    if evaluation.run_id is not None:
        report_run(database, evaluation.run_id, lock_timeout_seconds)
    if failures := [failure for each in thresholds for failure in each.find_failures(evaluation.metrics)]:
        raise QualityError("; ".join(failures))
    return evaluation


if __name__ == "__main__":
    sys.exit(run_flow(evaluate))
