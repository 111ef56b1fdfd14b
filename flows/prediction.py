"""Predicts the time of a planned run before its model is loaded."""

import logging
import time
from collections.abc import Sequence

from engine.errors import DatabaseError
from flows.workers import Night
from tasks.forecast.load_time import find_speed_ratio, forecast_load
from tasks.forecast.prediction import predict_run
from tasks.nights.pace import Pace
from tasks.runs.infer_job import InferJob
from tasks.runs.run import Run
from tasks.storage.plan_file import PlanSummary

LOGGER = logging.getLogger("batchloom")


def find_load_seconds(night: Night, deadline: float, title: str) -> float | None:
    """Seconds until the first step of the night's engines, 0 if they are loaded; None if the deadline comes first.

    Args:
        night: the engines and the model that they load.
        deadline: Unix time.
        title: of the run, for the log.
    """
    if night.workers.are_loaded:
        return 0.0
    seconds = forecast_load(night.source, night.engine)
    if time.time() + seconds < deadline:
        return seconds
    LOGGER.warning("%s: not begun before the deadline, since its model takes %.0f s to load", title, seconds)
    return None


def predict_night(
    night: Night,
    runs: Sequence[Run],
    job: InferJob,
    summary: PlanSummary,
    load_seconds: float = 0.0,
) -> Pace | None:
    """Note the prediction of a plan in its runs, for their reports. If it fails, only a warning is logged. Returns the
    `Pace` that corrects the forecast while the plan is computed, if the night has a deadline.

    Args:
        runs: those with rows in the plan.
        job, summary: what is computed, and its plan.
        load_seconds: time until the first step, if there is a deadline.
    """
    team = night.workers.team(night.engine)
    left = None if night.deadline is None else max(0.0, night.deadline - time.time() - load_seconds)
    try:
        ratio = find_speed_ratio(night.source, night.engine)
    except DatabaseError as error:  # such as a database that another process writes to
        LOGGER.warning("%s: the run is not predicted: %s", job.title, error)
        return None
    state = predict_run(job, summary, team, left, ratio, return_state=True)
    if state.is_completed():
        found = state.result()
        if left is not None:
            found = {"load_seconds": load_seconds} | found
        for run in runs:
            own = {}
            if left is not None:
                share = found["num_fitting_prompts"] / summary.num_rows
                own = {"num_fitting_rows": share * run.artifacts["requests"].num_rows}
            run.note(config={**run.record.config, "prediction": found | own})
        if left is not None and night.deadline is not None:
            rows = f"{found['num_fitting_prompts']:,.0f} of {summary.num_rows:,} prompts"
            partitions = f"{found['num_fitting_partitions']:,.0f} of {summary.num_partitions:,} partitions"
            loading = f" beside {load_seconds:.0f} s of loading the model" if load_seconds >= 1 else ""
            LOGGER.info("%s: %.0f s to the deadline%s: %s, %s, should fit", job.title, left, loading, rows, partitions)
            seconds_per_cost = found["step_seconds"] / sum(summary.partition_costs)
            return Pace(
                title=job.title,
                order=summary.dispatch_order,
                seconds=[cost * seconds_per_cost for cost in summary.partition_costs],
                num_rows=summary.partition_rows,
                num_engines=team.num_engines,
                load_seconds=load_seconds,
                begun=time.time(),
                deadline=night.deadline,
            )
    else:
        LOGGER.warning("%s: the run is not predicted: %s", job.title, state.message)
    return None
