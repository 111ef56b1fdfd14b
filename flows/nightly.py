"""The nightly job: the rows of a database that have no answer yet, answered by a model, written back.

DuckDB tables --read--> requests --tokenize--> tokens --plan_prefix (cached)--> plan
   plan --partition--> infer x N --> parts + steps --write (one transaction)--> DuckDB tables, views
"""

import logging
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

from prefect import flow
from prefect.logging.handlers import PrefectConsoleHandler
from pydantic import Field

from engine.device.placement import check_device
from engine.errors import ConfigError
from engine.limits import check_kv_budget
from engine.several_processes import check_gpus
from flows.settings import Attachments, EngineSettings, PlanSettings, WorkerSettings, find_attachments
from flows.workers import Workers
from flows.workload_run import Night, Source, answer_workload
from tasks.database.connection import connect
from tasks.publish import check_target, publish_night
from tasks.runs.infer_job import FailurePolicy
from tasks.runs.run import hold_database, needs_isolation, protect_result_storage
from tasks.runs.run_record import RunSummary, show_summaries
from tasks.storage.artifact import prune_cache, runs_folder
from tasks.workloads.workload import load_workload

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


@flow(name="nightly", flow_run_name="nightly-{database.stem}", retries=0, persist_result=False)
def nightly(
    database: Path,
    model: str,
    workloads: Annotated[tuple[str, ...], Field(min_length=1)] = ("snippets", "ranking"),
    adapter: Path | None = None,
    full: bool = False,
    engine: EngineSettings = EngineSettings(),  # noqa: B008 - frozen
    planning: PlanSettings = PlanSettings(),  # noqa: B008 - frozen
    failures: FailurePolicy = FailurePolicy(),  # noqa: B008 - frozen
    machines: WorkerSettings = WorkerSettings(),  # noqa: B008 - frozen
    publish: Path | None = None,
    attach: Attachments = (),
    sample: Annotated[int, Field(ge=1)] | None = None,
    keep: bool = False,
    lock_timeout_seconds: Annotated[float, Field(ge=0)] = 30.0,
) -> list[RunSummary]:
    """Answer what has no answer yet: for each workload read, tokenize, plan, infer, write.

    Args:
        database: DuckDB file with the inputs; the answers go there, too.
        model: checkpoint folder, GGUF file or hub id of a causal language model.
        workloads: shipped ones by name, others by the path of their TOML file.
        adapter: folder of a LoRA adapter of the model, for workloads whose file names none.
        full: answer every row again, not only what is new or changed.
        engine: how the model computes.
        planning: how prompts are grouped, and how much work is one unit.
        failures: when to try again, and when to give up.
        machines: which processes and machines compute.
        publish: where to put a copy of the database for readers, at the end; none if not given.
        attach: NAME=PATH of what SQL of workloads may read beside the database: a folder, a DuckDB or SQLite file.
        sample: answer only so many rows of each workload, and show them with a forecast for the whole.
        keep: write the answers of the sample, which count as done then; without it nothing is written.
        lock_timeout_seconds: how long to wait while another process has the database open.

    Returns:
        a summary for each workload, in order.
    Raises:
        BatchloomError: a parameter names nothing usable, or the work cannot be done; the message says what and where.
            What is answered is in the tables all the same.
    """
    with connect(database, read_only=True, lock_timeout_seconds=lock_timeout_seconds):
        pass  # a wrong path ends here, before anything is made beside it
    is_kept = sample is None or keep
    if (keep and sample is None) or (publish is not None and not is_kept):
        raise ConfigError("--keep belongs to --sample, and a sample that is not kept has nothing to --publish")
    if publish is not None:
        check_target(database, publish)
    with hold_database(database):
        protect_result_storage()
        if is_kept and any(runs_folder(database).glob("*-*")):
            from tasks.recover import recover_runs  # the first night comes after no other

            recover_runs(database)
        prune_cache(database)
        config = engine.to_config(database)
        source = Source.find(database, model, config, planning, full, find_attachments(attach))
        if machines.runner == "local":
            check_device(config.device)
            if config.tensor_parallel_size > 1:
                check_gpus(config)
            check_kv_budget(config, source.checkpoint)
        jobs = [load_workload(name).with_adapter(adapter).bind(source.checkpoint) for name in workloads]
        if len({job.output.table.lower() for job in jobs}) < len(jobs):
            raise ConfigError(f"each workload needs a table of its own, got {[job.output.table for job in jobs]}")
        for job in jobs:
            if job.kind.thinking:
                from tasks.prompts.thinking import check_thinking  # few workloads say anything of it

                check_thinking(job, source.checkpoint)
        night = Night(
            source=source,
            engine=config,
            failures=failures,
            machines=machines,
            workers=Workers(machines, any(needs_isolation(database, workload.name) for workload in jobs)),
            keeps_base=len({workload.adapter for workload in jobs}) > 1,
        )
        try:
            if sample is None:
                summaries = [answer_workload(night, workload) for workload in jobs]
            else:
                from flows.quality.sample import answer_samples

                summaries = answer_samples(night, jobs, sample, keep)
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


if __name__ == "__main__":
    from flows.cli import main

    sys.exit(main(nightly))
