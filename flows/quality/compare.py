"""Compares two prompts, or two models: `batchloom compare OLD.toml NEW.toml --database X --model M [--new-model N]`.

rows of the new workload --sample--> both prompts of each row --plan--> one plan --infer--> changed answers, agreement

Two models, or number formats, answer one after the other, each by a plan of its own.
"""

import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated

from prefect import flow
from pydantic import Field

from engine.config import Dtype
from engine.device.placement import check_device
from engine.errors import ConfigError, DatabaseError
from flows.command.run_flow import prepare_console, run_flow
from flows.foresight import forecast_rows, read_and_plan
from flows.nights.together import WorkloadRun, infer_together
from flows.quality.comparison_page import render_comparison
from flows.settings import Attachments, EngineSettings, PlanSettings, WorkerSettings, find_attachments
from flows.text_page import ARTIFACT_COLUMNS, publish_page
from flows.workers import Night, Workers
from flows.workload_run import begin_run, find_source, hold_night, infer_rows, tokenize_rows
from tasks.comparison.difference import PromptDiff, check_gold, compare_with_gold, measure_agreement
from tasks.comparison.paired_rows import PairedRow, check_comparable, list_changed
from tasks.forecast.sampled import AnsweredSample
from tasks.layouts.kept import use_kept
from tasks.partitions.part import count_reasons
from tasks.plan_prefix import write_plan
from tasks.read import read
from tasks.runs.infer_job import FailurePolicy, InferJob, JobMember
from tasks.sample import choose_rows, list_answer_lengths, read_answers, take_requests
from tasks.storage.artifact import ArtifactRef, runs_folder
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
    new_model: str = "",
    new_dtype: Dtype | None = None,
    engine: EngineSettings = EngineSettings(),  # noqa: B008 - frozen
    planning: PlanSettings = PlanSettings(),  # noqa: B008 - frozen
    failures: FailurePolicy = FailurePolicy(),  # noqa: B008 - frozen
    machines: WorkerSettings = WorkerSettings(),  # noqa: B008 - frozen
    attach: Attachments = (),
    lock_timeout_seconds: Annotated[float, Field(ge=0)] = 30.0,
) -> PromptDiff:
    """Answer the same rows with two workloads, as one batch, or with two models, and show which answers change; nothing
    is written.

    Args:
        database: DuckDB file with the input tables, and the gold rows if any.
        model: checkpoint folder, GGUF file or Hugging Face hub id of a language model.
        workloads: two workloads with the same key, named or as TOML files: the old one, then the new one.
        sample: number of rows of the new workload that both answer; with gold, of those that it judges.
        gold: table or view with expected values, as for evaluate.
        new_model: model that answers the new workload, if it is another one.
        new_dtype: number format of the new workload's model, if it is another one.
        engine: how the models compute.
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
        with ExitStack() as at_end:
            nights: list[Night] = []
            others = [(new_model or model, replace(config, dtype=new_dtype or config.dtype))]
            for name, its_config in [(model, config), *(others if new_model or new_dtype else [])]:
                source = find_source(database, name, its_config, planning, True, find_attachments(attach))
                machines.check_host(its_config, source.checkpoint)
                workers = Workers(machines, make_room=nights[0].workers.close if nights else None)
                at_end.enter_context(closing(workers))
                nights.append(Night(source=source, engine=its_config, failures=failures, workers=workers))
            first, second = (use_kept(database, load_workload(name)) for name in workloads)
            found = compare_workloads(nights, first, second, sample, gold)
    LOGGER.info("%s", render_comparison(found))
    description = f"{' against '.join(found.names)}: {len(found.changed):,} of {len(found.rows):,} changed"
    publish_page("comparison", second.name, render_comparison(found, ARTIFACT_COLUMNS), description)
    return found


def compare_workloads(
    nights: Sequence[Night], first: Workload, second: Workload, num_rows: int, gold: str | None
) -> PromptDiff:
    """See `compare`.

    Args:
        nights: that of both workloads, or of each its own.
        num_rows: size of the sample.
        gold: table of expected values; None for none.
    """
    old, new = nights[0], nights[-1]
    names = name_sides(nights, first, second)
    check_comparable(first, second)
    first, second = both = (first.bind(old.source.checkpoint), second.bind(new.source.checkpoint))
    gold_keys = None if gold is None else check_gold(new.source.database, gold, both)
    is_seen = new.workers.settings.runner == "ray"  # by workers on other hosts
    with scratch_folder("compare", runs_folder(new.source.database) if is_seen else None) as folder:
        whole = begin_run(new, second, folder)
        found, plan = read_and_plan(new.source, second, whole, new.num_engines)
        if plan is None:
            return PromptDiff(names=names)
        runs = [(first, begin_run(old, first, folder)), (second, begin_run(new, second, folder))]
        of_first, of_second = (run.folder for _, run in runs)
        asked = found.requests
        if gold_keys is not None:
            keys = {"gold_keys": gold_keys}
            asked = take_requests("compare/take_gold_rows", asked, keys, folder / "gold.parquet", keys=second.key)
        chosen = choose_rows(asked, whole.artifacts["tokens"], plan, of_second, num_rows, second).requests
        if gold is not None and not chosen.num_rows:
            raise DatabaseError(f"no row of gold table {gold!r} can be answered by workload {second.name!r}")
        of_all, which = read(old.source, first, of_first).requests, {"chosen": chosen.path}
        same = take_requests("compare/take_same_rows", of_all, which, of_first / "same.parquet", keys=first.key)
        requests, sources = [same, chosen], (old.source, new.source)
        tokens = [tokenize_rows(source, *run, each) for source, run, each in zip(sources, runs, requests, strict=True)]
        job, num_computed = (_answer_together if old is new else _answer_apart)(nights, runs, tokens, folder)
        parts = [run.list_parts() for _, run in runs]
        new.failures.check(count_reasons(chain(*parts)), sum(part.num_rows for part in chain(*parts)))
        answers = [read_answers(*given) for given in zip(both, requests, tokens, parts, strict=True)]
        rows = [PairedRow(*pair) for pair in zip(*answers, strict=True)]
        differences = [] if gold is None else compare_with_gold(new.source.database, gold, both, rows)
        lengths = [list_answer_lengths(side) for side in answers]
        steps = runs[-len(job.members)][1].list_steps()
        answered = AnsweredSample(job=job, output_tokens=lengths[-len(job.members) :], steps=steps)
        return PromptDiff(
            names=names,
            gold=gold or "",
            rows=tuple(rows),
            changed=tuple(list_changed(rows, (first.kind, second.kind))),
            agreements=tuple(measure_agreement(both, rows)),
            differences=tuple(differences),
            num_tokens_together=num_computed[0] if old is new else None,
            num_tokens_apart=sum(num_computed[-2:]),
            forecast=forecast_rows(new, plan, second, lengths[1], answered),
        )


def name_sides(nights: Sequence[Night], first: Workload, second: Workload) -> tuple[str, str]:
    """What both sides are called: by their workloads, and where that does not tell them apart, by more.

    Args:
        nights: see `compare_workloads`.
        first, second: the workloads.
    """
    if len(nights) > 1:
        models = [Path(each.source.model).name for each in nights]
        if models[0] == models[1]:
            models = [f"{name}, {each.engine.dtype}" for name, each in zip(models, nights, strict=True)]
        return f"{first.name} ({models[0]})", f"{second.name} ({models[1]})"
    if first.name == second.name:
        return f"{first.name} (old)", f"{second.name} (new)"
    return first.name, second.name


def _answer_together(
    nights: Sequence[Night], runs: Sequence[WorkloadRun], tokens: Sequence[ArtifactRef], folder: Path
) -> tuple[InferJob, list[int]]:
    """Answer both workloads as one batch; gives the job, and the prompt tokens of the plans of both, and of each."""
    (night,) = nights
    joint = write_joined(tokens, folder / "joint.parquet")
    plans = [_plan(night, runs, each, folder / f"plan-{n}.parquet") for n, each in enumerate([joint, *tokens])]
    job = infer_together(night, runs, tokens, plans[0])
    assert job is not None, "there is no deadline"
    return job, list(map(_count_planned, plans))


def _answer_apart(
    nights: Sequence[Night], runs: Sequence[WorkloadRun], tokens: Sequence[ArtifactRef], folder: Path
) -> tuple[InferJob, list[int]]:
    """Answer each workload in its own night; gives the second one's job, and the prompt tokens of both plans."""
    plans = []
    for number, (night, (workload, run), each) in enumerate(zip(nights, runs, tokens, strict=True)):
        plans.append(_plan(night, runs, each, folder / f"plan-{number}.parquet"))
        infer_rows(night, workload, run, plans[-1], is_whole=False)
    member = JobMember(run_folder=runs[1][1].folder, workload=runs[1][0])
    return nights[1].make_job(plans[1], member), list(map(_count_planned, plans))


def _plan(night: Night, runs: Sequence[WorkloadRun], tokens: ArtifactRef, target: Path) -> ArtifactRef:
    source, num_answer_tokens = night.source, max(workload.kind.max_answer_tokens for workload, _ in runs)
    return write_plan(tokens, target, source.method, source.partition_tokens, num_answer_tokens, source.block_size)


def _count_planned(plan: ArtifactRef) -> int:
    return read_plan_summary(plan).sharing.num_processed_tokens


if __name__ == "__main__":
    sys.exit(run_flow(compare))
