"""Answers several workloads of one model as one batch, planned together; each is written to its own table."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack

from engine.errors import DatabaseError, FailureRateError
from flows.workers import Night
from flows.workload_run import (
    begin_run,
    count_left,
    end_run,
    infer_plan,
    infer_rows,
    measure_all,
    plan_rows,
    read_rows,
    tokenize_rows,
    write_rows,
)
from tasks.layouts.settle import settle_layouts
from tasks.nights.joint_tokens import count_shared, join_tokens
from tasks.plan_prefix import plan_prefix
from tasks.read import read_answer_length
from tasks.recover import stop_run
from tasks.runs.failure_rate import check_input
from tasks.runs.infer_job import InferJob, JobMember
from tasks.runs.run import Run
from tasks.runs.run_summary import RunSummary
from tasks.runs.source import Source
from tasks.storage.artifact import ArtifactRef
from tasks.storage.plan_file import read_plan_summary
from tasks.storage.row_numbers import count_planned, find_first_row_ids
from tasks.workloads.workload import Workload

LOGGER = logging.getLogger("batchloom")

WorkloadRun = tuple[Workload, Run]


def answer_together(night: Night, workloads: Sequence[Workload]) -> dict[str, RunSummary | Exception]:
    """Answer workloads, of which none reads another's answers, from one plan: a shared prefix is computed once. Returns
    by workload its summary, or the error if too many of its rows failed or its answers could not be written. Raises
    the error of a stage, which ends all runs; answers so far are written.

    Each workload has its own run: table, content keys, counts, report. Steps, seconds of planning and inference, the
    plan's saving and the forecast are those of the whole batch. A deadline may leave rows of any workload.
    """
    runs: list[WorkloadRun] = []
    workloads = settle_layouts(night.source, workloads)
    try:
        for workload in workloads:
            runs.append((workload, begin_run(night, workload)))
        ends = _answer(night, runs)
    except BaseException as error:
        with ExitStack() as at_end:  # all are stopped, also if one of them cannot be
            for workload, run in runs:
                at_end.callback(stop_run, run, workload, error)
        raise
    for workload, run in runs:  # all before the first is written, which may be stopped
        if isinstance(end := ends.get(workload.name, 0), Exception):
            run.end("failed", f"{type(end).__name__}: {end}")
        else:
            end_run(run, end)
    return {workload.name: _write(workload, run, ends.get(workload.name)) for workload, run in runs}


def _write(workload: Workload, run: Run, end: int | Exception | None) -> RunSummary | Exception:
    if isinstance(end, Exception):
        stop_run(run, workload, end)
        return end
    try:
        return write_rows(workload, run)
    except DatabaseError as error:
        return error


def _answer(night: Night, runs: Sequence[WorkloadRun]) -> dict[str, int | Exception]:
    """Read, tokenize, plan and infer; gives by workload the number of prompts that the deadline left, or its error."""
    source = night.source
    found = [read_rows(source, workload, run) for workload, run in runs]
    ends: dict[str, int | Exception] = {}
    busy, tokens = list[WorkloadRun](), list[ArtifactRef]()
    for (workload, run), rows in zip(runs, found, strict=True):
        if rows.num_selected:
            prompts = tokenize_rows(source, workload, run, rows.requests)
            try:
                check_input(night.failures, workload, prompts, rows.num_selected + rows.num_already_done)
            except FailureRateError as error:
                ends[workload.name] = error
            else:
                busy.append((workload, run))
                tokens.append(prompts)
    return ends | (_infer(night, busy, tokens) if busy else {})


def _infer(night: Night, runs: Sequence[WorkloadRun], tokens: Sequence[ArtifactRef]) -> dict[str, int | Exception]:
    """Plan and infer the prompts of each run. See `_answer`."""
    if len(runs) == 1:
        workload, run = runs[0]
        try:
            plan = plan_rows(night.source, workload, run, tokens[0], night.num_engines)
            return {workload.name: infer_rows(night, workload, run, plan)}
        except FailureRateError as error:
            return {workload.name: error}
    num_planned = [count_planned(ref) for ref in tokens]
    plan = plan_together(night.source, runs, tokens, night.num_engines)
    if infer_together(night, runs, tokens, plan) is None:
        return {workload.name: num_rows for (workload, _), num_rows in zip(runs, num_planned, strict=True)}
    ends: dict[str, int | Exception] = {}
    for (workload, run), num_rows in zip(runs, num_planned, strict=True):
        try:
            ends[workload.name] = count_left(night, workload, run.list_parts(), num_rows)
        except FailureRateError as error:
            ends[workload.name] = error
    return ends


def plan_together(
    source: Source, runs: Sequence[WorkloadRun], tokens: Sequence[ArtifactRef], num_engines: int
) -> ArtifactRef:
    """The plan of all prompts. Each run notes it, and how many prompt tokens it shares with each other run.

    Args:
        tokens: the prompts of each run.
        num_engines: that infer the plan.
    """
    num_answer_tokens = round(_average([workload.kind.max_answer_tokens for workload, _ in runs], tokens))
    with measure_all([run for _, run in runs], "plan"):
        joint = join_tokens(str(source.database), tokens)
        plan = plan_prefix(source, joint, num_answer_tokens, num_engines)
        shared = count_shared(joint, find_first_row_ids(tokens), runs[0][1].folder)
    sharing = read_plan_summary(plan).sharing
    names = [workload.name for workload, _ in runs]
    for number, (_, run) in enumerate(runs):
        run.note(
            {"plan": plan},
            shared_with={name: shared[number][other] for other, name in enumerate(names) if other != number},
            token_saving_ratio=sharing.token_saving_ratio,
            best_token_saving_ratio=sharing.best_token_saving_ratio,
        )
    return plan


def infer_together(
    night: Night, runs: Sequence[WorkloadRun], tokens: Sequence[ArtifactRef], plan: ArtifactRef
) -> InferJob | None:
    """Infer the partitions of a joint plan to parts of each run; returns the job, or None if the model cannot load in
    time. See `infer_plan`.

    Args:
        tokens, plan: the prompts of each run, and the plan of all.
    """
    summary, members = read_plan_summary(plan), list_members(runs, tokens)
    job = night.make_job(plan, *members)
    LOGGER.info("%s: %s", job.title, summary.text)
    lengths = [member.expected_output_tokens or member.workload.kind.max_answer_tokens for member in members]
    parts = infer_plan(night, job, summary, [run for _, run in runs], _average(lengths, tokens))
    return None if parts is None else job


def list_members(runs: Sequence[WorkloadRun], tokens: Sequence[ArtifactRef]) -> list[JobMember]:
    """Each run as a member of the job of a joint plan, see `InferJob`; `tokens` are the prompts of each run."""
    return [
        JobMember(
            run_folder=run.folder,
            workload=workload,
            first_row_id=first_row_id,
            expected_output_tokens=read_answer_length(run.database, workload).expected_output_tokens,
        )
        for (workload, run), first_row_id in zip(runs, find_first_row_ids(tokens), strict=True)
    ]


def _average(values: Sequence[int], tokens: Sequence[ArtifactRef]) -> float:
    """The mean of a value of each workload, weighted by its number of rows."""
    num_rows = [ref.num_rows for ref in tokens]
    return sum(value * rows for value, rows in zip(values, num_rows, strict=True)) / max(1, sum(num_rows))
