"""Plans a workload, and forecasts its run, before its model is loaded."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from engine.config import EngineConfig
from engine.device.placement import check_device
from engine.errors import ArtifactError
from flows.workers import Night
from flows.workload_run import begin_run, plan_rows, read_rows, tokenize_rows
from tasks.database.connection import connect
from tasks.explain import explain as explain_plan
from tasks.forecast.forecast import Forecast
from tasks.forecast.hardware import Hardware, check_hardware
from tasks.forecast.load_time import find_speed_ratio
from tasks.forecast.prediction import predict_run
from tasks.forecast.sampled import AnsweredSample, SampledForecast, forecast_whole
from tasks.layouts.settle import settle_layouts
from tasks.nights.allotment import Portion, list_portions
from tasks.read import ReadResult, read_answer_length
from tasks.recover import prune_cache
from tasks.runs.infer_job import JobMember
from tasks.runs.run import Run, make_runs_folder
from tasks.runs.source import Source
from tasks.storage.artifact import ArtifactRef
from tasks.storage.plan_file import read_plan_summary
from tasks.storage.scratch_folder import scratch_folder
from tasks.workers.engine_team import EngineTeam, lay_out_workers
from tasks.workloads.workload import Workload

LOGGER = logging.getLogger("batchloom")

OF_ENCODERS = "whose nights have neither prefixes nor KV to explain"


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


def explain_workload(
    source: Source, workload: Workload, team: EngineTeam, hardware: Hardware, folder: Path
) -> tuple[Forecast, Run]:
    """Read, tokenize and plan one workload, then simulate it. Returns the forecast, and the run with its artifacts,
    which are in `folder`. See `tasks.explain.explain`."""
    run = Run.begin(source, workload, {}, folder)
    found, plan = read_and_plan(source, workload, run, team.num_engines)
    if plan is not None:
        LOGGER.info("%s: simulating", workload.name)
    return explain_plan(source, workload, found, plan, run, team, hardware), run


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


def open_database(database: Path, lock_timeout_seconds: float) -> None:
    """Make the folder in which the database's tokens and plans are kept. Raises `DatabaseError` for a wrong path or a
    locked file, `ArtifactError` if the folder cannot be made."""
    with connect(database, read_only=True, lock_timeout_seconds=lock_timeout_seconds):
        pass  # a wrong path fails here, before a folder is made next to it
    try:
        make_runs_folder(database)
    except ArtifactError as error:
        raise ArtifactError(f"{error}; tokens and plans are kept there, so copy the database elsewhere") from error
    prune_cache(database)


def choose_team(
    config: EngineConfig, workers: int | Literal["auto"], device: str
) -> tuple[EngineTeam, EngineConfig, str | None]:
    """The engines whose run is predicted, the settings with which this machine plans it, and the name of their device
    if it is not here. Raises `ConfigError` for a device that there is not. See `flows.explain`."""
    if device.lower() in ("cpu", "cuda"):
        config = replace(config, device=device.lower())
    elsewhere = device if device.lower() not in ("auto", "cpu", "cuda") else None
    check_hardware(elsewhere or config.device.partition(":")[0])
    if elsewhere is None:
        check_device(config.device)
        return lay_out_workers(workers, config), config, None
    team = EngineTeam(num_engines=1 if workers == "auto" else workers, engine=config)
    return team, replace(config, dtype="auto"), elsewhere  # this machine need not have that device's number formats
