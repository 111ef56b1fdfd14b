"""Plans a workload, and forecasts its run, before its model is loaded."""

import logging
from collections.abc import Sequence

from flows.workers import Night
from flows.workload_run import begin_run, plan_rows, read_rows, tokenize_rows
from tasks.forecast.load_time import find_speed_ratio
from tasks.forecast.prediction import predict_run
from tasks.forecast.sampled import AnsweredSample, SampledForecast, forecast_whole
from tasks.layouts.settle import settle_layouts
from tasks.nights.allotment import Portion, list_portions
from tasks.read import ReadResult, read_answer_length
from tasks.runs.infer_job import JobMember
from tasks.runs.run import Run
from tasks.runs.source import Source
from tasks.storage.artifact import ArtifactRef
from tasks.storage.plan_file import read_plan_summary
from tasks.storage.scratch_folder import scratch_folder
from tasks.workloads.workload import Workload

LOGGER = logging.getLogger("batchloom")


def read_and_plan(
    source: Source, workload: Workload, run: Run, num_engines: int
) -> tuple[ReadResult, ArtifactRef | None]:
    """The stages before `infer`: what was read, and its plan; None if no row needs an answer.

    Args:
        run: gets the artifacts and the seconds of each stage.
        num_engines: that infer the plan.
    """
    found = read_rows(source, workload, run)
    if not found.num_selected:
        return found, None
    return found, plan_rows(source, workload, run, tokenize_rows(source, workload, run, found.requests), num_engines)


def forecast_rows(
    night: Night, plan: ArtifactRef, workload: Workload, output_tokens: Sequence[int], sample: AnsweredSample
) -> SampledForecast | None:
    """See `forecast_whole`. If it fails, or no row can be answered, only a warning is logged."""
    if not read_plan_summary(plan).num_rows:
        LOGGER.warning("%s: no forecast: none of the rows can be answered", workload.name)
        return None
    team = night.workers.team(night.engine)
    state = forecast_whole(plan, workload, output_tokens, sample, team, return_state=True)
    if state.is_completed():
        return state.result()
    LOGGER.warning("%s: no forecast: %s", workload.name, state.message)
    return None


def foresee(night: Night, workload: Workload) -> list[Portion]:
    """The partitions of a step that is answered alone, with their predicted times; none if prompts are not grouped.
    Tokens stay in the database's cache, so the step does not make them again. Raises the error of what failed."""
    source = night.source
    if source.method == "none":
        return []
    with scratch_folder("foresight") as folder:
        (workload,) = settle_layouts(source, [workload.bind(source.checkpoint)], is_kept=False)
        run = begin_run(night, workload, folder)
        _, plan = read_and_plan(source, workload, run, night.num_engines)
        if plan is None or not (summary := read_plan_summary(plan)).num_rows:
            return []
        length, team = read_answer_length(source.database, workload), night.workers.team(night.engine)
        expected = length.expected_output_tokens
        job = night.make_job(plan, JobMember(run_folder=run.folder, workload=workload, expected_output_tokens=expected))
        ratio = find_speed_ratio(source, night.engine)
        found = predict_run(job, summary, team, None, ratio)
        return list_portions(workload.name, summary, found["elapsed_seconds"])
