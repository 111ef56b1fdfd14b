"""The nightly job: the rows of a database that have no answer yet, answered by a model, written back.

DuckDB tables --read--> requests --tokenize--> tokens --plan_prefix (cached)--> plan
   plan --partition--> infer x N --> parts + steps --write (one transaction)--> DuckDB tables, views
"""

import logging
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from prefect import flow, unmapped
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field

from engine.checkpoint import checkpoint_digest, resolve_checkpoint
from engine.config import EngineConfig
from flows.report import report_run
from flows.settings import EngineSettings, PlanSettings
from tasks.artifact import ArtifactRef
from tasks.artifact_cache import protect_result_storage, prune_cache
from tasks.database import connect
from tasks.engine_host import PROCESS_HOST
from tasks.infer import InferJob, infer
from tasks.plan_prefix import plan_prefix_once, read_plan_summary
from tasks.progress import watch_progress
from tasks.read import read
from tasks.run import Run, recover_runs
from tasks.run_folder import hold_database
from tasks.run_summary import RunSummary
from tasks.stop_request import StopRequest
from tasks.tokenize import read_max_model_len, tokenize_once
from tasks.workload import Workload, load_workload

LOGGER = logging.getLogger("batchloom")
LOGGER.setLevel(logging.INFO)  # else what a night says would not reach Prefect's console and log


@dataclass(frozen=True, slots=True, kw_only=True)
class Night:
    """What all workloads of one night have in common: the flow's parameters, looked up and found to be usable."""

    database: Path
    model: str
    checkpoint: Path
    model_digest: str
    max_model_len: int
    engine: EngineConfig
    planning: PlanSettings
    full: bool


@flow(name="nightly", flow_run_name="nightly-{database.stem}", retries=0, persist_result=False)
def nightly(
    database: Path,
    model: str,
    workloads: Annotated[tuple[str, ...], Field(min_length=1)] = ("snippets", "ranking"),
    full: bool = False,
    engine: EngineSettings = EngineSettings(),  # noqa: B008 - frozen
    planning: PlanSettings = PlanSettings(),  # noqa: B008 - frozen
    lock_timeout_seconds: Annotated[float, Field(ge=0)] = 30.0,
) -> list[RunSummary]:
    """Answer what has no answer yet: for each workload read, tokenize, plan, infer, write.

    Args:
        database: DuckDB file with the inputs; the answers go there, too.
        model: checkpoint folder, GGUF file or hub id of a causal language model.
        workloads: shipped ones by name, others by the path of their TOML file.
        full: answer every row again, not only what is new or changed.
        engine: how the model computes.
        planning: how prompts are grouped, and how much work is one unit.
        lock_timeout_seconds: how long to wait while another process has the database open.

    Returns:
        a summary for each workload, in order.

    Raises:
        BatchloomError: a parameter names nothing usable, or the work cannot be done; the message says what and where.
            Finished partitions are in the tables all the same.
    """
    with connect(database, read_only=True, lock_timeout_seconds=lock_timeout_seconds):
        pass  # a wrong path ends here, before anything is made beside it
    with hold_database(database):
        protect_result_storage()
        recover_runs(database)
        prune_cache(database)
        checkpoint = resolve_checkpoint(model)
        config = engine.to_config()
        night = Night(
            database=database,
            model=model,
            checkpoint=checkpoint,
            model_digest=checkpoint_digest(checkpoint),
            max_model_len=read_max_model_len(checkpoint, config.max_model_len),
            engine=config,
            planning=planning,
            full=full,
        )
        jobs = [load_workload(name) for name in workloads]
        try:
            return [run_workload(night, workload) for workload in jobs]
        finally:
            PROCESS_HOST.release()


def run_workload(night: Night, workload: Workload) -> RunSummary:
    """One workload from table to table. However it ends, finished partitions are written."""
    run = Run.begin(
        night.database,
        workload,
        night.model,
        night.model_digest,
        {"engine": asdict(night.engine), "planning": night.planning.model_dump(), "full": night.full},
    )
    try:
        with run.measure("read"):
            found = read(str(night.database), workload, night.model_digest, run.folder, night.full)
        run.note({"requests": found.requests}, num_already_done=found.num_already_done)
        if found.num_selected:
            answer_requests(night, run, found.requests)
    except BaseException as error:
        summary = run.stop(error)
        if summary is not None:
            LOGGER.info(summary.text)
        raise
    summary = run.complete()
    LOGGER.info(summary.text)
    if summary.num_rows:
        report_run(night.database, summary.run_id, run.plan)
    return summary


def answer_requests(night: Night, run: Run, requests: ArtifactRef) -> None:
    """From requests to parts: tokenize, plan, infer each partition."""
    workload = run.workload
    LOGGER.info("%s: %s rows to answer", workload.name, f"{requests.num_rows:,}")
    with run.measure("tokenize"):
        tokens = tokenize_once(
            night.database, requests, workload, night.checkpoint, night.model_digest, night.max_model_len
        )
    run.note({"tokens": tokens})
    with run.measure("plan"):
        plan = plan_prefix_once(
            night.database,
            tokens,
            night.planning.method,
            night.planning.partition_tokens,
            workload.decoding.max_new_tokens if workload.mode == "generate" else 1,
        )
        summary = read_plan_summary(plan)
    run.note(
        {"plan": plan},
        token_saving_ratio=summary.sharing.token_saving_ratio,
        best_token_saving_ratio=summary.sharing.best_token_saving_ratio,
    )
    LOGGER.info(
        "%s: %s prompt tokens, %.1f%% of them shared, in %s groups and %s partitions",
        workload.name,
        f"{summary.sharing.num_logical_tokens:,}",
        100 * summary.sharing.token_saving_ratio,
        f"{summary.num_groups:,}",
        f"{summary.num_partitions:,}",
    )
    job = InferJob(
        run_folder=run.folder,
        tokens=tokens,
        plan=plan,
        workload_source=workload.source,
        checkpoint=str(night.checkpoint),
        model_digest=night.model_digest,
        engine=night.engine,
    )
    with run.measure("infer"):
        infer_partitions(job, summary.num_partitions, workload.name, summary.num_rows)


def infer_partitions(job: InferJob, num_partitions: int, title: str, num_rows: int) -> None:
    """Map `infer` over the partitions: one after the other, since they share one engine.

    Raises what the first failing partition raised, and `KeyboardInterrupt` where somebody made a stop request; what is
    finished by then stays.
    """
    runner: ThreadPoolTaskRunner[ArtifactRef | None] = ThreadPoolTaskRunner(max_workers=1)
    stop = StopRequest(job.run_folder)
    with runner as workers, watch_progress(job.run_folder, title, num_rows), stop.make_on_error():
        parts = workers.map(infer, {"partition": list(range(num_partitions)), "job": unmapped(job)}).result()
        if None in parts:
            raise KeyboardInterrupt


if __name__ == "__main__":
    from flows.cli import main

    sys.exit(main(nightly))
