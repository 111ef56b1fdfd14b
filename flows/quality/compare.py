"""Compares two prompts: `batchloom compare OLD.toml NEW.toml --database X --model M --sample 200 [--gold TABLE]`.

rows of the new workload --sample--> both prompts of each row --plan--> one plan --infer--> changed answers, agreement
"""

import logging
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Annotated

from prefect import flow
from pydantic import Field

from flows.command.run_flow import prepare_console, run_flow
from flows.prediction import forecast_rows, read_and_plan
from flows.quality.comparison_page import render_comparison
from flows.quality.text_page import ARTIFACT_COLUMNS, publish_page
from flows.settings import Attachments, EngineSettings, PlanSettings, WorkerSettings, find_attachments
from flows.workers import Workers
from flows.workload_run import Night, begin_run, find_source, infer_rows
from tasks.answers.pair import PairedAnswers
from tasks.comparison.difference import PromptDiff, check_gold, compare_with_gold, measure_agreement
from tasks.comparison.paired_rows import pair_prompts, pair_workloads, read_pairs
from tasks.database.connection import connect
from tasks.forecast.sampled import AnsweredSample
from tasks.layouts.kept import use_kept
from tasks.plan_prefix import write_plan
from tasks.read import read
from tasks.runs.infer_job import FailurePolicy
from tasks.runs.run import hold_database, protect_result_storage
from tasks.sample import choose_rows
from tasks.storage.artifact import prune_cache
from tasks.storage.plan_file import read_plan_summary
from tasks.workloads.workload import Workload, load_workload

LOGGER = logging.getLogger("batchloom")

prepare_console()


@flow(name="compare", flow_run_name="compare-{database.stem}", retries=0, persist_result=False)
def compare(
    database: Path,
    model: str,
    workloads: tuple[str, str],
    sample: Annotated[int, Field(ge=1)] = 200,
    gold: str | None = None,
    engine: EngineSettings = EngineSettings(),  # noqa: B008 - frozen
    planning: PlanSettings = PlanSettings(),  # noqa: B008 - frozen
    failures: FailurePolicy = FailurePolicy(),  # noqa: B008 - frozen
    machines: WorkerSettings = WorkerSettings(),  # noqa: B008 - frozen
    attach: Attachments = (),
    lock_timeout_seconds: Annotated[float, Field(ge=0)] = 30.0,
) -> PromptDiff:
    """Answer the same rows with two workloads, as one batch, and show which answers change; nothing is written.

    Args:
        database: DuckDB file with the input tables, and the gold rows if any.
        model: checkpoint folder, GGUF file or Hugging Face hub id of a language model.
        workloads: two with the same key: the old one, then the new one.
        sample: number of rows of the new workload that both answer.
        gold: table or view with expected values, as for evaluate.
        engine: how the model computes.
        planning: how prompts are grouped by shared prefixes, and how large a partition is.
        failures: when the run tries again, and when it fails.
        machines: which processes and machines compute.
        attach: NAME=PATH of a folder, DuckDB or SQLite file that the SQL of workloads may read under this name.
        lock_timeout_seconds: seconds to wait while another process has the database open.

    Returns:
        both answers to each row, metrics of both with gold rows, and a forecast for answering all rows anew.
    Raises:
        BatchloomError: a parameter is wrong; the message says what and where.
    """
    with connect(database, read_only=True, lock_timeout_seconds=lock_timeout_seconds):
        pass  # a wrong path fails here, before a folder is made next to it
    first, second = (use_kept(database, load_workload(name)) for name in workloads)
    with hold_database(database, is_written=False):
        protect_result_storage()
        prune_cache(database)
        config = engine.to_config()
        source = find_source(database, model, config, planning, True, find_attachments(attach))
        machines.check_host(config, source.checkpoint)
        with closing(Workers(machines)) as workers:
            night = Night(source=source, engine=config, failures=failures, machines=machines, workers=workers)
            found = compare_workloads(night, first, second, sample, gold)
    LOGGER.info("%s", render_comparison(found))
    description = f"{' against '.join(found.names)}: {len(found.changed):,} of {len(found.rows):,} changed"
    publish_page("comparison", second.name, render_comparison(found, ARTIFACT_COLUMNS), description)
    return found


def compare_workloads(night: Night, first: Workload, second: Workload, num_rows: int, gold: str | None) -> PromptDiff:
    """See `compare`.

    Args:
        num_rows: size of the sample.
        gold: table of expected values; None for none.
    """
    source, names = night.source, (first.name, second.name)
    if first.name == second.name:
        names = (f"{first.name} (old)", f"{second.name} (new)")
    both = pair_workloads(first, second, source.checkpoint)
    assert isinstance(both.kind, PairedAnswers)
    if gold is not None:
        check_gold(source.database, gold, (first, second))
    with tempfile.TemporaryDirectory(prefix="batchloom-compare-") as name:
        folder = Path(name)
        whole = begin_run(night, second, folder)
        found, plan = read_and_plan(source, second, whole)
        if plan is None:
            return PromptDiff(names=names)
        run, asked = begin_run(night, both, folder), begin_run(night, first, folder)
        requests = read(source, first, asked.folder).requests
        chosen = choose_rows(found.requests, whole.artifacts["tokens"], plan, run.folder, num_rows, second).requests
        limit = source.max_model_len
        tokens = pair_prompts((first, second), requests, chosen, Path(run.folder), source.checkpoint, limit)
        how = (source.method, source.partition_tokens, both.kind.max_answer_tokens, source.block_size)
        plans = {side: write_plan(of_side, folder / f"{side}.parquet", *how) for side, of_side in tokens.items()}
        num_computed = {side: read_plan_summary(each).sharing.num_processed_tokens for side, each in plans.items()}
        infer_rows(night, both, run, plans["both"])
        rows = read_pairs(second, both.kind, chosen, tokens["both"], run.list_parts())
        differences = [] if gold is None else compare_with_gold(source.database, gold, (first, second), rows)
        lengths = [[row.num_output_tokens[side] for row in rows if row.errors[side] is None] for side in (0, 1)]
        answered = AnsweredSample(
            plan=plans["both"], workload=both, output_tokens=lengths[0] + lengths[1], steps=run.list_steps()
        )
        return PromptDiff(
            names=names,
            gold=gold or "",
            rows=tuple(rows),
            agreements=tuple(measure_agreement((first, second), rows)),
            differences=tuple(differences),
            num_tokens_together=num_computed["both"],
            num_tokens_apart=num_computed["first"] + num_computed["second"],
            forecast=forecast_rows(night, plan, second, lengths[1], answered),
        )


if __name__ == "__main__":
    sys.exit(run_flow(compare))
