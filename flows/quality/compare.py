"""Compares two prompts: `batchloom compare OLD.toml NEW.toml --database X --model M --sample 200 [--gold TABLE]`.

rows of the new workload --sample--> both prompts of each row --plan--> one plan --infer--> changed answers, agreement
"""

import logging
import sys
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated

from prefect import flow
from pydantic import Field

from engine.device.placement import check_device
from engine.errors import ConfigError, DatabaseError
from flows.command.run_flow import prepare_console, run_flow
from flows.foresight import forecast_rows, read_and_plan
from flows.nights.together import infer_together
from flows.quality.comparison_page import render_comparison
from flows.settings import Attachments, EngineSettings, PlanSettings, WorkerSettings, find_attachments
from flows.text_page import ARTIFACT_COLUMNS, publish_page
from flows.workers import Night, Workers
from flows.workload_run import begin_run, find_source, hold_night, tokenize_rows
from tasks.comparison.difference import PromptDiff, check_gold, compare_with_gold, measure_agreement
from tasks.comparison.paired_rows import PairedRow, check_comparable, list_changed
from tasks.forecast.sampled import AnsweredSample
from tasks.layouts.kept import use_kept
from tasks.partitions.part import count_reasons
from tasks.plan_prefix import write_plan
from tasks.read import read
from tasks.runs.infer_job import FailurePolicy
from tasks.sample import choose_rows, list_answer_lengths, read_answers, take_requests
from tasks.storage.artifact import runs_folder
from tasks.storage.plan_file import read_plan_summary
from tasks.storage.row_numbers import write_joined
from tasks.storage.scratch_folder import scratch_folder
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
        workloads: two workloads with the same key, named or as TOML files: the old one, then the new one.
        sample: number of rows of the new workload that both answer; with gold, of those that it judges.
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
    if machines.exchange:
        raise ConfigError("an exchange carries the work of one workload, and compare answers two: leave exchange empty")
    with hold_night(database, lock_timeout_seconds, is_written=False):
        config = replace(engine.to_config(), keep_prefixes_bytes=0)  # nothing is written
        if machines.runner == "local":
            check_device(config.device)  # before a model is fetched
        source = find_source(database, model, config, planning, True, find_attachments(attach))
        first, second = (use_kept(database, load_workload(name)) for name in workloads)
        machines.check_host(config, source.checkpoint)
        with closing(Workers(machines)) as workers:
            night = Night(source=source, engine=config, failures=failures, workers=workers)
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
    check_comparable(first, second)
    first, second = both = (first.bind(source.checkpoint), second.bind(source.checkpoint))
    gold_keys = None if gold is None else check_gold(source.database, gold, both)
    is_seen = night.workers.settings.runner == "ray"  # by workers on other hosts
    with scratch_folder("compare", runs_folder(source.database) if is_seen else None) as folder:
        whole = begin_run(night, second, folder)
        found, plan = read_and_plan(source, second, whole, night.num_engines)
        if plan is None:
            return PromptDiff(names=names)
        runs = [(workload, begin_run(night, workload, folder)) for workload in both]
        of_first, of_second = (run.folder for _, run in runs)
        asked = found.requests
        if gold_keys is not None:
            keys = {"gold_keys": gold_keys}
            asked = take_requests("compare/take_gold_rows", asked, keys, folder / "gold.parquet", keys=second.key)
        chosen = choose_rows(asked, whole.artifacts["tokens"], plan, of_second, num_rows, second).requests
        if gold is not None and not chosen.num_rows:
            raise DatabaseError(f"no row of gold table {gold!r} can be answered by workload {second.name!r}")
        of_all, which = read(source, first, of_first).requests, {"chosen": chosen.path}
        same = take_requests("compare/take_same_rows", of_all, which, of_first / "same.parquet", keys=first.key)
        requests = [same, chosen]
        tokens = [tokenize_rows(source, *run, each) for run, each in zip(runs, requests, strict=True)]
        joint = write_joined(tokens, folder / "joint.parquet")
        num_answer_tokens = max(workload.kind.max_answer_tokens for workload in both)
        how = (source.method, source.partition_tokens, num_answer_tokens, source.block_size)
        plans = [write_plan(each, folder / f"plan-{n}.parquet", *how) for n, each in enumerate([joint, *tokens])]
        num_computed = [read_plan_summary(each).sharing.num_processed_tokens for each in plans]
        job = infer_together(night, runs, tokens, plans[0])
        assert job is not None, "there is no deadline"
        parts = [run.list_parts() for _, run in runs]
        night.failures.check(count_reasons(chain(*parts)), sum(part.num_rows for part in chain(*parts)))
        answers = [read_answers(*given) for given in zip(both, requests, tokens, parts, strict=True)]
        rows = [PairedRow(*pair) for pair in zip(*answers, strict=True)]
        differences = [] if gold is None else compare_with_gold(source.database, gold, both, rows)
        lengths = [list_answer_lengths(side) for side in answers]
        answered = AnsweredSample(job=job, output_tokens=lengths, steps=runs[0][1].list_steps())
        return PromptDiff(
            names=names,
            gold=gold or "",
            rows=tuple(rows),
            changed=tuple(list_changed(rows, (first.kind, second.kind))),
            agreements=tuple(measure_agreement(both, rows)),
            differences=tuple(differences),
            num_tokens_together=num_computed[0],
            num_tokens_apart=num_computed[1] + num_computed[2],
            forecast=forecast_rows(night, plan, second, lengths[1], answered),
        )


if __name__ == "__main__":
    sys.exit(run_flow(compare))
