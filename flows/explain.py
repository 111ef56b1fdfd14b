"""Explain the nightly job before it runs: read, tokenize and plan as the night does, then simulate instead of infer.

DuckDB tables --read--> requests --tokenize (cached)--> tokens --plan_prefix (cached)--> plan --explain--> forecast
"""

import logging
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from prefect import flow
from pydantic import Field

from engine.config import EngineConfig
from engine.model.checkpoint import checkpoint_digest, resolve_checkpoint
from flows.explain_page import publish_forecast
from flows.settings import EngineSettings, PlanSettings
from tasks.database.connection import connect
from tasks.explain import ExplainJob
from tasks.explain import explain as explain_plan
from tasks.forecast.forecast import Forecast
from tasks.forecast.hardware import choose_hardware
from tasks.plan_prefix import plan_prefix
from tasks.read import read
from tasks.runs.artifact_cache import prune_cache
from tasks.tokenize import read_max_model_len, tokenize
from tasks.workers.engine_team import EngineTeam
from tasks.workers.worker_layout import lay_out_workers
from tasks.workloads.workload import Workload, load_workload

LOGGER = logging.getLogger("batchloom")
LOGGER.setLevel(logging.INFO)  # else how far it is would not reach Prefect's log, nor standard error


@flow(name="explain", flow_run_name="explain-{database.stem}", retries=0, persist_result=False)
def explain(
    database: Path,
    model: str,
    workloads: Annotated[tuple[str, ...], Field(min_length=1)] = ("snippets", "ranking"),
    device: str = "auto",
    workers: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto",
    full: bool = False,
    engine: EngineSettings = EngineSettings(),  # noqa: B008 - frozen
    planning: PlanSettings = PlanSettings(),  # noqa: B008 - frozen
    lock_timeout_seconds: Annotated[float, Field(ge=0)] = 30.0,
) -> list[Forecast]:
    """Say what the nightly flow would do with the same parameters, and how long it would take on a device.

    Tokens and plan are kept where the nightly flow looks for them, so the night does not make them again.

    Args:
        database: DuckDB file with the inputs; nothing in it is changed.
        model: checkpoint folder, GGUF file or hub id; its weights are not loaded.
        workloads: shipped ones by name, others by the path of their TOML file.
        device: a100, h100, h200, mi250 or mi300x; cpu or cuda is what this machine has; auto its GPU, else its CPU.
        workers: engines side by side, each on such a device, or dividing this machine's CPU; auto: one of a device that
            is named, else as the night has it.
        full: explain every row, not only what is new or changed.
        engine: how the model computes.
        planning: how prompts are grouped, and how much work is one unit.
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
    team = choose_team(device, workers, engine.to_config())
    config = team.engine
    job = ExplainJob(
        database=str(database),
        model=model,
        checkpoint=str(checkpoint),
        engine=config,
        hardware=choose_hardware(device, checkpoint, config, team.num_on_host),
        num_engines=team.num_engines,
        method=planning.method,
    )
    digest, max_model_len = checkpoint_digest(checkpoint), read_max_model_len(checkpoint, config.max_model_len)
    jobs = [load_workload(name) for name in workloads]
    forecasts = [explain_workload(workload, job, planning, digest, max_model_len, full) for workload in jobs]
    for forecast in forecasts:
        publish_forecast(forecast)
    return forecasts


def choose_team(device: str, workers: int | Literal["auto"], engine: EngineConfig) -> EngineTeam:
    """The engines that a night with `workers` has on this host, or on so many devices of a kind.

    Raises:
        ConfigError: more workers than GPUs.
    """
    if device.lower() not in ("auto", "cpu", "cuda"):
        return EngineTeam(num_engines=1 if workers == "auto" else workers, engine=engine)
    layout = lay_out_workers(workers, replace(engine, device=device.lower()))
    num_engines = len(layout.environments)
    return EngineTeam(num_engines=num_engines, num_on_host=num_engines, engine=layout.engine)


def explain_workload(
    workload: Workload, job: ExplainJob, planning: PlanSettings, model_digest: str, max_model_len: int, full: bool
) -> Forecast:
    """One workload, from table to forecast. The texts of the rows are on disk only meanwhile."""
    with tempfile.TemporaryDirectory(prefix="batchloom-explain-") as folder:
        found = read(job.database, workload, model_digest, folder, full)
        if not found.num_selected:
            return explain_plan(workload, found, None, job, {"read": found.seconds})
        LOGGER.info("%s: %s rows to tokenize", workload.name, f"{found.num_selected:,}")
        started = time.perf_counter()
        tokens = tokenize(job.database, found.requests, workload, job.checkpoint, model_digest, max_model_len)
        LOGGER.info("%s: planning and simulating", workload.name)
        tokenized = time.perf_counter()
        plan = plan_prefix(
            job.database,
            tokens,
            planning.method,
            planning.partition_tokens,
            workload.decoding.max_new_tokens if workload.mode == "generate" else 1,
        )
        seconds = {
            "read": found.seconds,
            "tokenize": tokenized - started,
            "plan": time.perf_counter() - tokenized,
        }
        return explain_plan(workload, found, plan, job, seconds)


if __name__ == "__main__":
    from flows.cli import main

    sys.exit(main(explain))
