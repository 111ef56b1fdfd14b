"""What a workload's run is expected to take, before its model is loaded."""

import logging
import time

from flows.workload_run import Night
from tasks.forecast.prediction import predict_run
from tasks.nights.pace import Pace
from tasks.read import AnswerLength
from tasks.runs.run import Run
from tasks.storage.artifact import ArtifactRef
from tasks.storage.plan_file import PlanSummary, count_partition_rows
from tasks.workloads.workload import Workload

LOGGER = logging.getLogger("batchloom")


def predict_night(
    night: Night,
    workload: Workload,
    run: Run,
    plan: ArtifactRef,
    summary: PlanSummary,
    answer: AnswerLength,
    load_seconds: float = 0.0,
) -> Pace | None:
    """Note what the run is expected to take, for its report. A run that cannot be predicted goes on without.

    Returns what corrects the forecast while the run goes on, where it has a deadline.

    Args:
        run: gets the prediction as a note.
        plan: the plan artifact, summarised in `summary`.
        answer: how long an answer is taken to be.
        load_seconds: until the first step, where there is a deadline.
    """
    team = night.workers.count(night.engine)
    left = None if night.deadline is None else max(0.0, night.deadline - time.time() - load_seconds)
    state = predict_run(plan, summary, workload, answer, night.source.checkpoint, team, left, return_state=True)
    if state.is_completed():
        found = state.result()
        if left is not None:
            found = {"load_seconds": load_seconds} | found
        run.note(config={**run.record.config, "prediction": found})
        if left is not None and night.deadline is not None:
            rows = f"{found['num_fitting_rows']:,.0f} of {summary.num_rows:,} rows"
            partitions = f"{found['num_fitting_partitions']:,.0f} of {summary.num_partitions:,} partitions"
            loading = f" beside {load_seconds:.0f} s of loading the model" if load_seconds >= 1 else ""
            LOGGER.info(
                "%s: %.0f s to the deadline%s: %s, %s, should fit", workload.name, left, loading, rows, partitions
            )
            seconds_per_cost = found["step_seconds"] / sum(summary.partition_costs)
            return Pace(
                title=workload.name,
                order=summary.dispatch_order,
                seconds=[cost * seconds_per_cost for cost in summary.partition_costs],
                num_rows=count_partition_rows(plan).tolist(),
                num_engines=team.num_engines,
                load_seconds=load_seconds,
                begun=time.time(),
                deadline=night.deadline,
            )
    else:
        LOGGER.warning("%s: the run is not predicted: %s", workload.name, state.message)
    return None
