"""The nightly flow: a model answers the rows of a database that have no answer yet.

DuckDB tables --read--> requests --tokenize--> tokens --plan_prefix (cached)--> plan
   plan --partition--> infer x N --> parts + steps --write (one transaction)--> DuckDB tables, views
"""

import sys
from pathlib import Path
from typing import Annotated

from prefect import flow
from pydantic import Field

from engine.device.placement import check_device
from engine.errors import ConfigError
from flows.command.run_flow import prepare_console, run_flow
from flows.settings import Attachments, EngineSettings, PlanSettings, WorkerSettings, find_attachments
from flows.workers import Night, Workers
from flows.workload_run import answer_workload, find_source, hold_night, load_workloads
from tasks.publish import check_target, publish_night
from tasks.runs.infer_job import FailurePolicy
from tasks.runs.run import isolation_mark
from tasks.runs.run_summary import RunSummary, show_summaries

prepare_console()


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
    """Answer the rows that have no answer yet: for each workload read, tokenize, plan, infer, write. Returns a summary
    for each workload, in order. Raises `BatchloomError`, which says what cannot be done; answers given before stay.

    Args:
        database: DuckDB file with the input tables; the answers are written to it.
        model: checkpoint folder, GGUF file or Hugging Face hub id of a language model.
        workloads: what to answer: the name of a shipped workload or the path of a TOML file.
        adapter: folder of a LoRA adapter of the model, for workloads whose file names none.
        full: answer all rows again, not only new and changed ones.
        engine: how the model computes.
        planning: how prompts are grouped by shared prefixes, and how large a partition is.
        failures: when the run tries again, and when it fails.
        machines: which processes and machines compute.
        publish: file that gets a copy of the database at the end, for readers; none if not given.
        attach: NAME=PATH of a folder, DuckDB or SQLite file that the SQL of workloads may read under this name.
        sample: answer only this many rows of each workload, and show them with a forecast for all rows.
        keep: write the sample's answers, which then count as done; without it nothing is written.
        lock_timeout_seconds: seconds to wait while another process has the database open.
    """
    is_kept = sample is None or keep
    if keep and sample is None:
        raise ConfigError("--keep belongs to --sample: without it all answers are kept")
    if publish is not None and not is_kept:
        raise ConfigError("a sample that is not kept has nothing to --publish; add --keep")
    attached = find_attachments(attach)
    if publish is not None:
        check_target(database, publish, attached)
    with hold_night(database, lock_timeout_seconds, is_written=is_kept):
        config = engine.to_config(database)
        if machines.runner == "local":
            check_device(config.device)  # before a model is fetched
        source = find_source(database, model, config, planning, full, attached)
        machines.check_host(config, source.checkpoint)
        chosen = load_workloads(workloads, source, adapter, lock_timeout_seconds)
        night = Night(
            source=source,
            engine=config,
            failures=failures,
            workers=Workers(machines, any(isolation_mark(database, workload.name).exists() for workload in chosen)),
            keeps_base=len({workload.adapter for workload in chosen}) > 1,
        )
        try:
            if sample is None:
                summaries = [answer_workload(night, workload) for workload in chosen]
            else:
                from flows.quality.sample import answer_sample

                summaries = [done for each in chosen if (done := answer_sample(night, each, sample, keep))]
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
    sys.exit(run_flow(nightly))
