"""Explain the nightly job before it runs: read, tokenize and plan as the night does, then simulate instead of infer.

DuckDB tables --read--> requests --tokenize (cached)--> tokens --plan_prefix (cached)--> plan --explain--> forecast
"""

import logging
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from prefect import flow
from pydantic import Field

from engine.config import EngineConfig
from engine.encoding.families import is_encoder
from engine.errors import ModelError
from engine.model.loading.checkpoint import resolve_checkpoint
from flows.explain_page import publish_forecast
from flows.layouts import settle
from flows.settings import Attachments, EngineSettings, PlanSettings, find_attachments
from flows.workload_run import Source, read_and_plan
from tasks.database.connection import connect
from tasks.explain import ExplainJob
from tasks.explain import explain as explain_plan
from tasks.forecast.forecast import Forecast
from tasks.forecast.hardware import choose_hardware
from tasks.runs.run import Run
from tasks.runs.run_record import RunRecord
from tasks.storage.artifact import prune_cache
from tasks.workers.engine_team import EngineTeam, lay_out_workers
from tasks.workloads.workload import Workload, load_workload

LOGGER = logging.getLogger("batchloom")
LOGGER.setLevel(logging.INFO)  # else how far it is would not reach Prefect's log, nor standard error


@flow(name="explain", flow_run_name="explain-{database.stem}", retries=0, persist_result=False)
def explain(
    database: Path,
    model: str,
    workloads: Annotated[tuple[str, ...], Field(min_length=1)] = ("snippets", "ranking"),
    adapter: Path | None = None,
    device: str = "auto",
    workers: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto",
    full: bool = False,
    engine: EngineSettings = EngineSettings(),  # noqa: B008 - frozen
    planning: PlanSettings = PlanSettings(),  # noqa: B008 - frozen
    attach: Attachments = (),
    lock_timeout_seconds: Annotated[float, Field(ge=0)] = 30.0,
) -> list[Forecast]:
    """Say what the nightly flow would do with the same parameters, and how long it would take on a device.

    Tokens and plan are kept where the nightly flow looks for them, so the night does not make them again.

    Args:
        database: DuckDB file with the inputs; nothing in it is changed.
        model: checkpoint folder, GGUF file or hub id; its weights are not loaded.
        workloads: shipped ones by name, others by the path of their TOML file.
        adapter: folder of a LoRA adapter of the model, for workloads whose file names none.
        device: a100, h100, h200, mi250 or mi300x; cpu or cuda is what this machine has; auto its GPU, else its CPU.
        workers: engines side by side, each on such a device, or dividing this machine's CPU; auto: one of a device that
            is named, else as the night has it.
        full: explain every row, not only what is new or changed.
        engine: how the model computes.
        planning: how prompts are grouped, and how much work is one unit.
        attach: NAME=PATH of what SQL of workloads may read beside the database: a folder, a DuckDB or SQLite file.
        lock_timeout_seconds: how long to wait while another process has the database open.

    Returns:
        a forecast for each workload, in order; everything in it is simulated. Each is an artifact of the flow run, too.
    Raises:
        BatchloomError: a parameter names nothing usable; the message says what and where.
    """
    with connect(database, read_only=True, lock_timeout_seconds=lock_timeout_seconds):
        pass  # a wrong path ends here, before anything is made beside it
    prune_cache(database)
    checkpoint = resolve_checkpoint(model)
    if is_encoder(checkpoint):
        raise ModelError(f"model {model!r} is an encoder, whose nights have neither prefixes nor KV to explain")
    team = choose_team(device, workers, engine.to_config())
    job = ExplainJob(
        database=str(database),
        model=model,
        checkpoint=str(checkpoint),
        engine=team.engine,
        hardware=choose_hardware(device, checkpoint, team.engine, team.num_on_host),
        num_engines=team.num_engines,
        method=planning.method,
    )
    source = Source.find(database, model, team.engine, planning, full, find_attachments(attach))
    jobs = [load_workload(name).with_adapter(adapter).bind(checkpoint) for name in workloads]
    forecasts = [explain_workload(source, workload, job) for workload in jobs]
    for forecast in forecasts:
        publish_forecast(forecast)
    return forecasts


def choose_team(device: str, workers: int | Literal["auto"], engine: EngineConfig) -> EngineTeam:
    """The engines that a night with `workers` has on this host, or on so many devices of a kind.

    Args:
        device: "auto", "cpu" or "cuda": what this host has; else the name of a device in the table.
        workers: number of engines; "auto": one for each GPU of this host, or one.
        engine: settings as the user gave them, for all engines together.
    Raises:
        ConfigError: more workers than GPUs.
    """
    if device.lower() not in ("auto", "cpu", "cuda"):
        return EngineTeam(num_engines=1 if workers == "auto" else workers, engine=engine)
    return lay_out_workers(workers, replace(engine, device=device.lower()))


def explain_workload(source: Source, workload: Workload, job: ExplainJob) -> Forecast:
    """One workload, from table to forecast. The texts of the rows are on disk only meanwhile.

    Args:
        source: of the rows and their prompts.
        workload: what would be answered.
        job: what all workloads of the forecast have in common.
    """
    with tempfile.TemporaryDirectory(prefix="batchloom-explain-") as folder:
        (workload,) = settle(source, [workload], is_kept=False)
        record = RunRecord.begin(workload, source.model, source.model_digest, {})
        run = Run.create(source.database, record, Path(folder))
        found, plan = read_and_plan(source, workload, run)
        if plan is not None:
            LOGGER.info("%s: simulating", workload.name)
        return explain_plan(workload, found, plan, job, dict(run.record.seconds))


if __name__ == "__main__":
    from flows.cli import main

    sys.exit(main(explain))
