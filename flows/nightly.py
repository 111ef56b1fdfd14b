"""The nightly job: the rows of a database that have no answer yet, answered by a model, written back.

DuckDB tables --read--> requests --tokenize--> tokens --plan_prefix (cached)--> plan
   plan --partition--> infer x N --> parts + steps --write (one transaction)--> DuckDB tables, views
"""

import logging
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from prefect import flow
from pydantic import Field

from engine.config import EngineConfig
from engine.model.checkpoint import checkpoint_digest, resolve_checkpoint
from flows.publish import publish_night
from flows.report import report_run
from flows.settings import EngineSettings, PlanSettings, WorkerSettings
from flows.workers import Workers
from tasks.database.connection import connect
from tasks.forecast.prediction import FEWEST_TOKENS_TO_PREDICT, AnswerLength, predict_run, read_answer_length
from tasks.infer import ENDED
from tasks.partitions.part import count_reasons
from tasks.plan_prefix import plan_prefix
from tasks.publish import check_target
from tasks.read import read
from tasks.runs.artifact_cache import prune_cache
from tasks.runs.crash_isolation import guard, is_guarded
from tasks.runs.database_lock import hold_database
from tasks.runs.infer_job import InferJob
from tasks.runs.night_artifacts import show_summaries
from tasks.runs.progress import PlannedWork
from tasks.runs.run import Run, recover_runs
from tasks.runs.run_summary import RunSummary
from tasks.runs.shared_run import name_exchange
from tasks.storage.artifact import ArtifactRef
from tasks.storage.plan_file import PlanSummary, read_plan_summary
from tasks.tokenize import read_max_model_len, tokenize
from tasks.workloads.failure_policy import FailurePolicy
from tasks.workloads.workload import Workload, load_workload

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
    failures: FailurePolicy
    machines: WorkerSettings
    workers: Workers
    full: bool


@flow(name="nightly", flow_run_name="nightly-{database.stem}", retries=0, persist_result=False)
def nightly(
    database: Path,
    model: str,
    workloads: Annotated[tuple[str, ...], Field(min_length=1)] = ("snippets", "ranking"),
    full: bool = False,
    engine: EngineSettings = EngineSettings(),  # noqa: B008 - frozen
    planning: PlanSettings = PlanSettings(),  # noqa: B008 - frozen
    failures: FailurePolicy = FailurePolicy(),  # noqa: B008 - frozen
    machines: WorkerSettings = WorkerSettings(),  # noqa: B008 - frozen
    publish: Path | None = None,
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
        failures: when to try again, and when to give up.
        machines: which processes and machines compute.
        publish: where to put a copy of the database for readers, at the end; none if not given.
        lock_timeout_seconds: how long to wait while another process has the database open.

    Returns:
        a summary for each workload, in order.

    Raises:
        BatchloomError: a parameter names nothing usable, or the work cannot be done; the message says what and where.
            Finished partitions are in the tables all the same.
    """
    with connect(database, read_only=True, lock_timeout_seconds=lock_timeout_seconds):
        pass  # a wrong path ends here, before anything is made beside it
    if publish is not None:
        check_target(database, publish)
    with hold_database(database):
        recover_runs(database)
        prune_cache(database)
        checkpoint = resolve_checkpoint(model)
        config = engine.to_config()
        jobs = [load_workload(name) for name in workloads]
        night = Night(
            database=database,
            model=model,
            checkpoint=checkpoint,
            model_digest=checkpoint_digest(checkpoint),
            max_model_len=read_max_model_len(checkpoint, config.max_model_len),
            engine=config,
            planning=planning,
            failures=failures,
            machines=machines,
            workers=Workers(machines, any(is_guarded(database, workload.name) for workload in jobs)),
            full=full,
        )
        try:
            summaries = [run_workload(night, workload) for workload in jobs]
        except Exception:
            if publish is not None:
                publish_night(database, publish, is_lenient=True)
            raise
        finally:
            night.workers.close()
        show_summaries(summaries)
        if publish is not None:
            publish_night(database, publish)
        return summaries


def run_workload(night: Night, workload: Workload) -> RunSummary:
    """One workload from table to table. However it ends, finished partitions are written."""
    run = Run.begin(
        night.database,
        workload,
        night.model,
        night.model_digest,
        {
            "engine": asdict(night.engine),
            "planning": night.planning.model_dump(),
            "failures": asdict(night.failures),
            "machines": night.machines.model_dump(),
            "workload": {"source": workload.source, "key": list(workload.key)},
            "full": night.full,
        },
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
        tokens = tokenize(
            str(night.database), requests, workload, str(night.checkpoint), night.model_digest, night.max_model_len
        )
    run.note({"tokens": tokens})
    with run.measure("plan"):
        plan = plan_prefix(
            str(night.database),
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
    answer = read_answer_length(night.database, workload)
    predict_night(night, run, plan, summary, answer)
    job = InferJob(
        run_folder=run.folder,
        plan=plan,
        workload=workload,
        checkpoint=str(night.checkpoint),
        model_digest=night.model_digest,
        engine=night.engine,
        failures=night.failures,
        expected_output_tokens=answer.expected_output_tokens,
        exchange=name_exchange(url, run.folder, night.model) if (url := night.machines.exchange) else None,
    )
    with run.measure("infer"):
        work = PlannedWork.of(summary, workload, answer.expected_output_tokens)
        parts = night.workers.infer_partitions(job, summary.dispatch_order, workload.name, work)
    reasons = count_reasons(parts)
    guard(night.database, workload.name, is_needed=ENDED.reason in reasons)
    night.failures.check(reasons, sum(part.num_rows for part in parts))


def predict_night(night: Night, run: Run, plan: ArtifactRef, summary: PlanSummary, answer: AnswerLength) -> None:
    """Note what the run is expected to take, for its report. A run that cannot be predicted goes on without."""
    if summary.sharing.num_processed_tokens < FEWEST_TOKENS_TO_PREDICT:
        return
    team = night.workers.count(night.engine)
    state = predict_run(plan, summary, run.workload, answer, night.checkpoint, team, return_state=True)
    if state.is_completed():
        run.note({}, config={**run.config, "prediction": state.result()})
    else:
        LOGGER.warning("%s: the run is not predicted: %s", run.workload.name, state.message)


if __name__ == "__main__":
    from flows.cli import main

    sys.exit(main(nightly))
