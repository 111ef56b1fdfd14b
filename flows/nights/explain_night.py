"""Explain a night file before it runs: each workload alone, and the batches in which the night answers them.

See `flows.explain`. Rows that depend on the night's own answers are not known before it, so their steps are left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

from prefect import flow
from pydantic import Field

from engine.encoding.families import is_encoder
from engine.errors import DatabaseError
from engine.model.loading.checkpoint import resolve_checkpoint
from flows.command.run_flow import prepare_console
from flows.explain_page import publish_forecast, publish_night_forecast
from flows.foresight import OF_ENCODERS, choose_team, explain_workload, open_database
from flows.nights.check import check_workload
from flows.nights.night_file import NightPlan, load_night
from flows.nights.together import list_members, plan_together
from flows.workload_run import find_source
from tasks.cascades.row_choice import RowChoice
from tasks.forecast.forecast import Forecast
from tasks.forecast.hardware import Hardware, choose_hardware
from tasks.forecast.load_time import find_speed_ratio, forecast_load
from tasks.forecast.night_forecast import BatchForecast, NightForecast
from tasks.forecast.prediction import predict_run
from tasks.layouts.settle import settle_layouts
from tasks.nights.check_steps import find_query_problems
from tasks.nights.deadline import find_deadline
from tasks.nights.graph import list_batches, plan_waves
from tasks.runs.infer_job import FailurePolicy, InferJob
from tasks.runs.run import Run
from tasks.runs.source import Source
from tasks.storage.artifact import ArtifactRef
from tasks.storage.plan_file import read_plan_summary
from tasks.storage.scratch_folder import scratch_folder
from tasks.workers.engine_team import EngineTeam
from tasks.workloads.workload import Workload

prepare_console()


@flow(name="explain", flow_run_name="explain-{file.stem}", retries=0, persist_result=False)
def explain_night(
    file: Path,
    device: str = "auto",
    full: bool = False,
    lock_timeout_seconds: Annotated[float, Field(ge=0)] = 30.0,
) -> NightForecast:
    """Predict what the night of a file would do, and how long it would take; returns the forecast, whose pages are
    artifacts of the flow run. Nothing in the database is changed. Raises `BatchloomError` if a file or a setting is
    wrong, or a query cannot run.

    Args:
        file: the night file.
        device: a100, h100, h200, mi250 or mi300x; cpu or cuda: this machine's; auto: that of each model's table.
        full: explain all rows, not only new and changed ones.
        lock_timeout_seconds: seconds to wait while another process has the database open.
    """
    begun, plan = datetime.now().astimezone(), load_night(file)
    deadline = find_deadline(plan.tables.until, plan.tables.budget, begun)
    open_database(plan.database, lock_timeout_seconds)
    unknown = {step.name: f"its rows depend on {', '.join(step.after)}" for step in plan.steps if step.after}
    models: dict[str, _Model] = {}
    for name in dict.fromkeys(step.model for step in plan.steps if not step.after):
        checkpoint = resolve_checkpoint(plan.models[name][0])
        if is_encoder(checkpoint):
            unknown |= {step.name: f"{name} is an encoder, {OF_ENCODERS}" for step in plan.steps if step.model == name}
        else:
            models[name] = _Model.find(plan, name, checkpoint, device, full)
    waves = plan_waves([step for step in plan.steps if step.name not in unknown])
    bound: dict[str, Workload] = {}
    for wave in waves:
        source = models[wave.model].source
        for name in wave.steps:
            bound[name] = check_workload(plan.workloads[name], source.checkpoint, source.max_model_len)
    workloads = {**plan.workloads, **bound}
    if problems := find_query_problems(plan.database, plan.steps, workloads, plan.attach, lock_timeout_seconds):
        raise DatabaseError("; ".join(problems))
    batches = [
        batch for wave in waves for batch in models[wave.model].explain(plan, [bound[name] for name in wave.steps])
    ]
    found = NightForecast(
        title=file.name,
        batches=tuple(batches),
        unknown=unknown,
        seconds=sum(batch.seconds + (batch.load_seconds or 0.0) for batch in batches),
        seconds_allowed=None if deadline is None else (deadline - begun).total_seconds(),
    )
    publish_night_forecast(found)
    return found


@dataclass(slots=True, kw_only=True)
class _Model:
    """A model of the night, and where it computes. `load_seconds` is 0 once it is loaded, None if that is not known."""

    name: str
    source: Source
    team: EngineTeam
    hardware: Hardware
    load_seconds: float | None

    @classmethod
    def find(cls, plan: NightPlan, name: str, checkpoint: Path, device: str, full: bool) -> "_Model":
        """A model of the night file, whose files are in `checkpoint`. See `explain_night`."""
        path, settings = plan.models[name]
        team, config, elsewhere = choose_team(settings.to_config(), plan.tables.machines.workers, device)
        hardware = choose_hardware(checkpoint, team, elsewhere)
        hardware.kv_bytes(team.engine)  # a budget that does not fit fails here, before rows are read
        source, load_seconds = find_source(plan.database, path, config, plan.tables.planning, full, plan.attach), None
        if elsewhere is None:
            hardware = hardware.corrected(find_speed_ratio(source, config))
            load_seconds = forecast_load(source, config)
        return cls(name=name, source=source, team=team, hardware=hardware, load_seconds=load_seconds)

    def explain(self, plan: NightPlan, workloads: Sequence[Workload]) -> Iterator[BatchForecast]:
        """Explain a wave of workloads, batch after batch."""
        first = RowChoice(role="first", model_digest=self.source.model_digest)
        choices = {workload.name: first for workload in workloads if workload.name in plan.cascades}
        source = replace(self.source, choices=choices)
        for batch in list_batches(workloads, is_joint=not plan.tables.machines.exchange):
            with scratch_folder("explain") as folder:
                yield self._explain_batch(source, batch, folder)

    def _explain_batch(self, source: Source, workloads: Sequence[Workload], folder: Path) -> BatchForecast:
        forecasts, busy = list[Forecast](), list[tuple[Workload, Run]]()
        for workload in settle_layouts(source, workloads, is_kept=False):
            forecast, run = explain_workload(source, workload, self.team, self.hardware, folder)
            publish_forecast(forecast)
            forecasts.append(forecast)
            if "plan" in run.artifacts:
                busy.append((workload, run))
        load_seconds: float | None = 0.0
        num_planned_tokens, seconds = 0, 0.0
        if busy:
            load_seconds, self.load_seconds = self.load_seconds, self.load_seconds and 0.0
            plan = busy[0][1].artifacts["plan"]
            if len(busy) == 1:
                seconds = sum(each.prediction.seconds for each in forecasts if each.prediction is not None)
            else:
                plan, seconds = self._predict_together(source, busy)
            num_planned_tokens = read_plan_summary(plan).sharing.num_processed_tokens
        return BatchForecast(
            model=self.name,
            workloads=tuple(forecasts),
            num_planned_tokens=num_planned_tokens,
            load_seconds=load_seconds,
            seconds=seconds,
        )

    def _predict_together(self, source: Source, runs: Sequence[tuple[Workload, Run]]) -> tuple[ArtifactRef, float]:
        """The joint plan of several workloads, and the seconds that it would take."""
        tokens = [run.artifacts["tokens"] for _, run in runs]
        plan = plan_together(source, runs, tokens, self.team.num_engines)
        summary = read_plan_summary(plan)
        if not summary.num_rows:
            return plan, 0.0
        job = InferJob(
            members=tuple(list_members(runs, tokens)),
            plan=plan,
            checkpoint=str(source.checkpoint),
            model_digest=source.model_digest,
            engine=self.team.engine,
            failures=FailurePolicy(),
        )
        return plan, predict_run(job, summary, self.team, hardware=self.hardware)["elapsed_seconds"]
