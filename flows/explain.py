"""Explain the nightly job before it runs: read, tokenize and plan as the night does, then simulate instead of infer.

DuckDB tables --read--> requests --tokenize (cached)--> tokens --plan_prefix (cached)--> plan --explain--> forecast
"""

import logging
import sys
from pathlib import Path
from typing import Annotated, Literal

from prefect import flow
from pydantic import Field

from engine.encoding.families import is_encoder
from engine.errors import DatabaseError, ModelError
from engine.model.loading.checkpoint import resolve_checkpoint
from flows.command.run_flow import prepare_console, run_flow
from flows.explain_page import publish_forecast
from flows.foresight import OF_ENCODERS, choose_team, explain_workload, open_database
from flows.settings import Attachments, EngineSettings, PlanSettings, find_attachments
from flows.workload_run import find_source, load_workloads
from tasks.database.connection import connect, restrict_sql
from tasks.database.schema import check_requests
from tasks.forecast.forecast import Forecast
from tasks.forecast.hardware import choose_hardware
from tasks.forecast.load_time import find_speed_ratio
from tasks.layouts.settle import settle_layouts
from tasks.storage.artifact import runs_folder
from tasks.storage.scratch_folder import scratch_folder

LOGGER = logging.getLogger("batchloom")

prepare_console()


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
    """Predict what the nightly flow would do with the same parameters, and how long it would take on a device; returns
    a simulated forecast for each workload, in order, each also an artifact of the flow run.

    Tokens and plan are kept in the database's cache, so the nightly flow does not make them again. Raises
    `BatchloomError`, which says what parameter is wrong.

    Args:
        database: DuckDB file with the input tables; nothing in it is changed.
        model: checkpoint folder, GGUF file or Hugging Face hub id; its weights are not loaded.
        workloads: what to explain: the name of a shipped workload or the path of a TOML file.
        adapter: folder of a LoRA adapter of the model, for workloads whose file names none.
        device: a100, h100, h200, mi250 or mi300x; cpu or cuda: this machine's; auto: that of engine,
            which is this machine's GPU, else its CPU, unless it says otherwise.
        workers: number of engines, each on such a device, or sharing this machine's CPU; auto: one on a named device,
            else as many as the nightly flow has.
        full: explain all rows, not only new and changed ones.
        engine: how the model computes.
        planning: how prompts are grouped by shared prefixes, and how large a partition is.
        attach: NAME=PATH of a folder, DuckDB or SQLite file that the SQL of workloads may read under this name.
        lock_timeout_seconds: seconds to wait while another process has the database open.
    """
    open_database(database, lock_timeout_seconds)
    team, config, elsewhere = choose_team(engine.to_config(), workers, device)
    checkpoint = resolve_checkpoint(model)
    if is_encoder(checkpoint):
        raise ModelError(f"model {model!r} is an encoder, {OF_ENCODERS}")
    hardware = choose_hardware(checkpoint, team, elsewhere)
    hardware.kv_bytes(team.engine)  # a budget that does not fit fails here, before rows are read
    source = find_source(database, model, config, planning, full, find_attachments(attach))
    if elsewhere is None:
        hardware = hardware.corrected(find_speed_ratio(source, config))
    chosen = load_workloads(workloads, source, adapter, lock_timeout_seconds)
    with connect(database, read_only=True) as connection:
        restrict_sql(connection, [runs_folder(database)], source.attach, [each.requests_sql for each in chosen])
        for workload in chosen:
            try:
                check_requests(connection, workload, str(database))
            except DatabaseError as error:
                later = "if an earlier workload makes it, explain this one after that one's night"
                raise DatabaseError(f"{error}; {later}") from error
    forecasts = []
    for workload in chosen:
        with scratch_folder("explain") as folder:
            (settled,) = settle_layouts(source, [workload], is_kept=False)
            forecasts.append(explain_workload(source, settled, team, hardware, folder)[0])
        publish_forecast(forecasts[-1])
    return forecasts


if __name__ == "__main__":
    sys.exit(run_flow(explain))
