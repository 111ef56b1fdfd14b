"""`nightly --sample N`: answers some rows of each workload, shows them with a forecast for all rows."""

import logging
from contextlib import ExitStack

from flows.foresight import forecast_rows, read_and_plan
from flows.quality.sample_page import render_sample
from flows.text_page import ARTIFACT_COLUMNS, publish_page
from flows.workers import Night
from flows.workload_run import begin_run, end_run, infer_rows, plan_rows, tokenize_rows, write_rows
from tasks.forecast.sampled import AnsweredSample
from tasks.layouts.settle import settle_layouts
from tasks.recover import discard, stop_run
from tasks.runs.infer_job import JobMember
from tasks.runs.run import Run
from tasks.runs.run_summary import RunSummary
from tasks.sample import Sample, choose_rows, list_answer_lengths, read_answers
from tasks.storage.artifact import ArtifactRef
from tasks.storage.scratch_folder import scratch_folder
from tasks.workloads.workload import Workload

LOGGER = logging.getLogger("batchloom")


def answer_sample(night: Night, workload: Workload, num_rows: int, keep: bool) -> RunSummary | None:
    """Answer a sample of a workload's rows; show the answers and a forecast for all rows. The plan of all rows stays in
    the cache for the night. Returns the summary of the run; None if nothing was written.

    Args:
        keep: whether the answers are written to the tables, and so count as done.
    """
    source = night.source
    (workload,) = settle_layouts(source, [workload], is_kept=keep)
    with scratch_folder("sample") as folder, ExitStack() as at_end:
        whole = begin_run(night, workload, folder)
        found, plan = read_and_plan(source, workload, whole, night.num_engines)
        if plan is None:
            LOGGER.info("%s: nothing new to do", workload.name)
            return None
        machines = night.workers.settings
        is_private = not keep and not machines.exchange and machines.runner == "local"
        run = begin_run(night, workload, folder if is_private else None)
        if not keep:
            run.is_written = True  # else the next run would write it if this process is killed
            at_end.callback(discard, run.folder)  # and its copy in an object store
        try:
            all_tokens = whole.artifacts["tokens"]
            sample = choose_rows(found.requests, all_tokens, plan, run.folder, num_rows, workload)
            run.note({"requests": sample.requests}, num_already_done=found.num_already_done)
            tokens = tokenize_rows(source, workload, run, sample.requests)
            sample_plan = plan_rows(source, workload, run, tokens, night.num_engines)
            num_left = infer_rows(night, workload, run, sample_plan, is_whole=False)
            _show(night, workload, run, sample, plan)
        except BaseException as error:
            if keep:
                stop_run(run, workload, error)
            raise
        if not keep:
            return None
        end_run(run, num_left)
        return write_rows(workload, run)


def _show(night: Night, workload: Workload, run: Run, sample: Sample, plan: ArtifactRef) -> None:
    """Show the answers, and the forecast for all rows, whose plan is given, if it can be computed."""
    rows = read_answers(workload, sample.requests, run.artifacts["tokens"], run.list_parts())
    output_tokens = list_answer_lengths(rows)
    job = night.make_job(run.artifacts["plan"], JobMember(run_folder=run.folder, workload=workload))
    answered = AnsweredSample(job=job, output_tokens=[output_tokens], steps=run.list_steps())
    shown = (workload.name, sample, rows, forecast_rows(night, plan, workload, output_tokens, answered))
    LOGGER.info("%s", render_sample(*shown))
    description = f"{workload.name}: {len(rows):,} of {sample.num_all:,} rows answered"
    publish_page("sample", workload.name, render_sample(*shown, ARTIFACT_COLUMNS), description)
