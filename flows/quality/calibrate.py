"""Fit calibrations to gold rows: `batchloom calibrate --database X --workload W --gold TABLE`."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from prefect import flow
from prefect.artifacts import create_table_artifact
from pydantic import Field

from flows.command.run_flow import prepare_console, run_flow
from tasks.evaluation.calibration import Calibration, Method, calibrate_answers
from tasks.evaluation.evaluation import bind_to_answers
from tasks.runs.run_summary import artifact_key
from tasks.workloads.workload import load_workload

LOGGER = logging.getLogger("batchloom")

prepare_console()


@flow(name="calibrate", flow_run_name="calibrate-{database.stem}-{workload}", retries=0, persist_result=False)
def calibrate(
    database: Path,
    workload: str,
    gold: str,
    method: Method = "auto",
    lock_timeout_seconds: Annotated[float, Field(ge=0)] = 30.0,
) -> Sequence[Calibration]:
    """Fit a monotone map from each probability to the share of right gold rows, and return the maps; a view has the
    calibrated values. Raises `BatchloomError`, which says what parameter is wrong or where gold rows are too few.

    Args:
        database: DuckDB file with the answers and the gold rows.
        workload: the name of a shipped workload or the path of a TOML file.
        gold: table or view with expected values, as for evaluate; a probability needs 50 rows with an answer.
        method: platt: a logistic curve; isotonic: piecewise linear, for many rows; auto: isotonic from 1,000 rows on.
        lock_timeout_seconds: seconds to wait while another process has the database open.
    """
    loaded = bind_to_answers(database, load_workload(workload), lock_timeout_seconds=lock_timeout_seconds)
    found = calibrate_answers(str(database), loaded, gold, method, lock_timeout_seconds=lock_timeout_seconds)
    for each in found:
        name = each.column_name + (f" of {each.label!r}" if each.label is not None else "")
        errors = f"mean squared error {each.brier_before:.4f} before, {each.brier_after:.4f} after, in five folds"
        errors += f" (answers of {each.model})"
        LOGGER.info("%s: %s: %s on %s gold rows: %s", loaded.name, name, each.method, f"{each.num_rows:,}", errors)
    rows = [
        {
            "column": each.column_name,
            "label": each.label or "",
            "model": each.model,
            "method": each.method,
            "gold rows": each.num_rows,
            "Brier score before": round(each.brier_before, 5),
            "after, in five folds": round(each.brier_after, 5),
        }
        for each in found
    ]
    description = f"Calibrations of {loaded.name}"
    create_table_artifact(rows, key=artifact_key("calibration", loaded.name), description=description)
    return found


if __name__ == "__main__":
    sys.exit(run_flow(calibrate))
