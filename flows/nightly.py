"""The nightly job: the rows of a database that have no answer yet, answered by a model, written back.

DuckDB tables --read--> requests --tokenize--> tokens --plan_prefix (cached)--> plan
   plan --partition--> infer x N --> parts + steps --write (one transaction)--> DuckDB tables, views
"""

import logging
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from prefect import flow
from prefect.logging.handlers import PrefectConsoleHandler
from pydantic import Field

from engine.config import EngineConfig
from engine.device.placement import check_device
from engine.limits import check_kv_budget
from engine.model.checkpoint import checkpoint_digest, resolve_checkpoint
from flows.report import report_run
from flows.settings import EngineSettings, PlanSettings, WorkerSettings
from flows.workers import Workers
from tasks.database.connection import connect
from tasks.partitions.answer import ENDED
from tasks.partitions.part import count_reasons
from tasks.plan_prefix import plan_prefix
from tasks.publish import check_target, publish_night
from tasks.read import AnswerLength, ReadResult, read, read_answer_length
from tasks.recover import recover_runs, stop_run
from tasks.runs.infer_job import Exchange, FailurePolicy, InferJob
from tasks.runs.progress import PlannedWork
from tasks.runs.run import Run, hold_database, needs_isolation, protect_result_storage, set_isolation
from tasks.runs.run_record import RunRecord, RunSummary, show_summaries
from tasks.storage.artifact import ArtifactRef, prune_cache
from tasks.storage.plan_file import PlanSummary, read_plan_summary
from tasks.tokenize import read_max_model_len, tokenize
from tasks.workloads.workload import Workload, load_workload
from tasks.write import write

LOGGER = logging.getLogger("batchloom")
LOGGER.setLevel(logging.INFO)  # else what a night says would not reach Prefect's console and log


def go_on_unread() -> None:
    """Keep a night alive when the reader of its log is gone, as when the worker of its deployment dies.

    rich ends the process at the next line that it cannot print.
    """
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, PrefectConsoleHandler):
                console = handler.console
                console.on_broken_pipe = partial(setattr, console, "quiet", True)  # type: ignore[method-assign]


go_on_unread()

FEWEST_TOKENS_TO_PREDICT = 50_000
"""Prompt tokens to compute: less is done before a device that is not in the table has been measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where rows come from and how their prompts are made and grouped; the same for all workloads of a flow run."""

    database: Path
    model: str
    checkpoint: Path
    model_digest: str
    max_model_len: int
    planning: PlanSettings
    full: bool

    @classmethod
    def find(cls, database: Path, model: str, engine: EngineConfig, planning: PlanSettings, full: bool) -> "Source":
        """Look the model up.

        Args:
            model: checkpoint folder, GGUF file or hub id.
            engine: limits the length of a prompt with its answer.
            planning: how prompts are grouped.
            full: answer every row again.
        Raises:
            ModelError: it cannot be used.
        """
        checkpoint = resolve_checkpoint(model)
        return cls(
            database=database,
            model=model,
            checkpoint=checkpoint,
            model_digest=checkpoint_digest(checkpoint),
            max_model_len=read_max_model_len(checkpoint, engine.max_model_len),
            planning=planning,
            full=full,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Night:
    """What all workloads of one night have in common besides their source: who computes, and what failures mean."""

    source: Source
    engine: EngineConfig
    failures: FailurePolicy
    machines: WorkerSettings
    workers: Workers


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
        protect_result_storage()
        recover_runs(database)
        prune_cache(database)
        config = engine.to_config()
        source = Source.find(database, model, config, planning, full)
        if machines.runner == "local":
            check_device(config.device)
            check_kv_budget(config, source.checkpoint)
        jobs = [load_workload(name) for name in workloads]
        night = Night(
            source=source,
            engine=config,
            failures=failures,
            machines=machines,
            workers=Workers(machines, any(needs_isolation(database, workload.name) for workload in jobs)),
        )
        try:
            summaries = [answer_workload(night, workload) for workload in jobs]
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


def answer_workload(night: Night, workload: Workload) -> RunSummary:
    """Read, tokenize, plan, infer, write: one workload from table to table.

    However the run ends, its finished partitions are written, by `stop_run` or by the next night's `recover_runs`.
    """
    source = night.source
    config = {
        "engine": asdict(night.engine),
        "planning": source.planning.model_dump(),
        "failures": asdict(night.failures),
        "machines": night.machines.model_dump(),
        "workload": {"source": workload.source, "key": list(workload.key)},
        "full": source.full,
    }
    run = Run.create(source.database, RunRecord.begin(workload, source.model, source.model_digest, config))
    try:
        _, plan = read_and_plan(source, workload, run)
        if plan is not None:
            infer(night, workload, run, plan)
    except BaseException as error:
        stop_run(run, workload, error)
        raise
    run.end("completed")
    summary = write(run, workload)
    run.finish()
    LOGGER.info(summary.text)
    if summary.num_rows:
        report_run(source.database, summary.run_id, run.artifacts.get("plan"))
    return summary


def read_and_plan(source: Source, workload: Workload, run: Run) -> tuple[ReadResult, ArtifactRef | None]:
    """Rows to requests, tokens and plan, as the night and its explanation have them.

    Args:
        source: of the rows and their prompts.
        workload: what to answer.
        run: keeps the artifacts and the seconds that each stage takes.
    Returns:
        what was read, and the plan; None where there is nothing to do.
    """
    with run.measure("read"):
        found = read(str(source.database), workload, source.model_digest, run.folder, source.full)
    run.note({"requests": found.requests}, num_already_done=found.num_already_done)
    if not found.num_selected:
        return found, None
    LOGGER.info("%s: %s rows to answer", workload.name, f"{found.num_selected:,}")
    database, checkpoint, planning = str(source.database), str(source.checkpoint), source.planning
    with run.measure("tokenize"):
        tokens = tokenize(database, found.requests, workload, checkpoint, source.model_digest, source.max_model_len)
    run.note({"tokens": tokens})
    with run.measure("plan"):
        plan = plan_prefix(database, tokens, planning.method, planning.partition_tokens, workload.max_answer_tokens)
    run.note({"plan": plan})
    return found, plan


def infer(night: Night, workload: Workload, run: Run, plan: ArtifactRef) -> None:
    """Each partition of the plan to parts, by the night's workers; raises where too many rows failed.

    Args:
        night: the workers, and what failures mean.
        run: keeps parts, seconds and notes.
        plan: the plan artifact.
    """
    source, summary = night.source, read_plan_summary(plan)
    sharing = summary.sharing
    run.note(token_saving_ratio=sharing.token_saving_ratio, best_token_saving_ratio=sharing.best_token_saving_ratio)
    LOGGER.info("%s: %s", workload.name, summary.text)
    answer = read_answer_length(source.database, workload)
    predict_night(night, workload, run, plan, summary, answer)
    job = InferJob(
        run_folder=run.folder,
        plan=plan,
        workload=workload,
        checkpoint=str(source.checkpoint),
        model_digest=source.model_digest,
        engine=night.engine,
        failures=night.failures,
        expected_output_tokens=answer.expected_output_tokens,
        exchange=Exchange.below(url, run.folder, source.model) if (url := night.machines.exchange) else None,
    )
    with run.measure("infer"):
        work = PlannedWork.of(summary, workload, answer.expected_output_tokens)
        parts = night.workers.infer_partitions(job, summary.dispatch_order, workload.name, work)
    reasons = count_reasons(parts)
    set_isolation(source.database, workload.name, is_needed=ENDED.reason in reasons)
    night.failures.check(reasons, sum(part.num_rows for part in parts))


def predict_night(
    night: Night, workload: Workload, run: Run, plan: ArtifactRef, summary: PlanSummary, answer: AnswerLength
) -> None:
    """Note what the run is expected to take, for its report. A run that cannot be predicted goes on without.

    Args:
        run: gets the prediction as a note.
        plan: the plan artifact, summarised in `summary`.
        answer: how long an answer is taken to be.
    """
    if summary.sharing.num_processed_tokens < FEWEST_TOKENS_TO_PREDICT:
        return
    from tasks.forecast.prediction import predict_run  # a simulation that short nights do not need

    team = night.workers.count(night.engine)
    state = predict_run(plan, summary, workload, answer, night.source.checkpoint, team, return_state=True)
    if state.is_completed():
        run.note(config={**run.record.config, "prediction": state.result()})
    else:
        LOGGER.warning("%s: the run is not predicted: %s", workload.name, state.message)


if __name__ == "__main__":
    from flows.cli import main

    sys.exit(main(nightly))
