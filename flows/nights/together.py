"""Workloads of one model that do not read each other's answers: planned as one batch, each written to its own table."""

import logging
from collections.abc import Sequence

from engine.errors import FailureRateError
from flows.layouts import settle
from flows.workers import infer_plan, measure_all
from flows.workload_run import (
    Night,
    begin_run,
    check_failures,
    infer_rows,
    plan_rows,
    read_rows,
    tokenize_rows,
    write_rows,
)
from tasks.nights.joint_tokens import count_shared, join_tokens, name_shared
from tasks.plan_prefix import plan_prefix
from tasks.read import read_answer_length
from tasks.recover import stop_run
from tasks.runs.infer_job import Member
from tasks.runs.run import Run
from tasks.runs.run_record import RunSummary
from tasks.storage.artifact import ArtifactRef
from tasks.storage.plan_file import read_plan_summary
from tasks.storage.row_numbers import find_first_row_ids
from tasks.workloads.workload import Workload

LOGGER = logging.getLogger("batchloom")

Job = tuple[Workload, Run]


def answer_together(night: Night, workloads: Sequence[Workload]) -> dict[str, RunSummary | Exception]:
    """Answer workloads from one plan: a beginning that prompts of several share is computed once for all.

    Each has a run of its own, with its table, content keys, counts and report. Steps, the seconds of planning and
    inference, the plan's saving and what was forecast of them are those of all, and each run names what it shares with
    which other one. A deadline leaves rows of any of them.

    Args:
        night: whose model answers.
        workloads: none reads what another one writes.
    Returns:
        of each workload its summary, or why it failed where too many of its rows did.
    Raises:
        what ends all of them; what is answered is in the tables all the same.
    """
    jobs: list[Job] = []
    workloads = settle(night.source, workloads)
    try:
        for workload in workloads:
            jobs.append((workload, begin_run(night, workload)))
        ends = _answer_jobs(night, jobs)
    except BaseException as error:
        for workload, run in jobs:
            stop_run(run, workload, error)
        raise
    results: dict[str, RunSummary | Exception] = {}
    for workload, run in jobs:
        end = ends.get(workload.name, 0)
        if isinstance(end, Exception):
            stop_run(run, workload, end)
            results[workload.name] = end
        else:
            results[workload.name] = write_rows(workload, run, end)
    return results


def _answer_jobs(night: Night, jobs: Sequence[Job]) -> dict[str, int | Exception]:
    """Read, tokenize, plan and infer; gives by workload how many rows the deadline has left, or why it failed."""
    source = night.source
    busy = []
    for workload, run in jobs:
        found = read_rows(source, workload, run)
        if found.num_selected:
            busy.append((workload, run, found.requests))
    if not busy:
        return {}
    tokens = [tokenize_rows(source, workload, run, requests) for workload, run, requests in busy]
    jobs = [(workload, run) for workload, run, _ in busy]
    if len(jobs) == 1:
        workload, run = jobs[0]
        return {workload.name: infer_rows(night, workload, run, plan_rows(source, workload, run, tokens[0]))}
    return _infer_together(night, jobs, tokens, _plan_together(night, jobs, tokens))


def _plan_together(night: Night, jobs: Sequence[Job], tokens: Sequence[ArtifactRef]) -> ArtifactRef:
    """The plan of all prompts, noted in each run with what the run shares with the others."""
    source, planning, database = night.source, night.source.planning, str(night.source.database)
    num_answer_tokens = round(_average([workload.kind.max_answer_tokens for workload, _ in jobs], tokens))
    given = (planning.partition_tokens, num_answer_tokens, source.block_size, source.is_cheapest_first)
    with measure_all([run for _, run in jobs], "plan"):
        joint = join_tokens(database, tokens)
        plan = plan_prefix(database, joint, planning.method, *given)
        shared = count_shared(joint, find_first_row_ids(tokens), jobs[0][1].folder)
    sharing = read_plan_summary(plan).sharing
    names = [workload.name for workload, _ in jobs]
    for number, (_, run) in enumerate(jobs):
        run.note(
            {"plan": plan},
            shared_with=name_shared(names, shared, number),
            token_saving_ratio=sharing.token_saving_ratio,
            best_token_saving_ratio=sharing.best_token_saving_ratio,
        )
    return plan


def _infer_together(
    night: Night, jobs: Sequence[Job], tokens: Sequence[ArtifactRef], plan: ArtifactRef
) -> dict[str, int | Exception]:
    """Each partition of the joint plan to parts of all runs; gives by workload the rows left, or why it failed."""
    source, summary = night.source, read_plan_summary(plan)
    lengths = [read_answer_length(source.database, workload) for workload, _ in jobs]
    firsts = find_first_row_ids(tokens)
    members = tuple(
        Member(
            run_folder=run.folder,
            workload=workload,
            first_row_id=first_row_id,
            expected_output_tokens=length.expected_output_tokens,
        )
        for (workload, run), first_row_id, length in zip(jobs, firsts, lengths, strict=True)
    )
    job = night.make_job(*jobs[0], plan, None, members)
    LOGGER.info("%s: %s", job.title, summary.text)
    num_answer_tokens = _average([length.num_tokens for length in lengths], tokens)
    shares = {run: ref.num_rows / summary.num_rows for (_, run), ref in zip(jobs, tokens, strict=True)}
    if infer_plan(night, job, summary, shares, num_answer_tokens) is None:
        return {workload.name: ref.num_rows for (workload, _), ref in zip(jobs, tokens, strict=True)}
    ends: dict[str, int | Exception] = {}
    for (workload, run), ref in zip(jobs, tokens, strict=True):
        try:
            ends[workload.name] = ref.num_rows - check_failures(night, workload, run.list_parts())
        except FailureRateError as error:
            ends[workload.name] = error
    return ends


def _average(values: Sequence[int], tokens: Sequence[ArtifactRef]) -> float:
    """Of a number of each workload, by its rows."""
    num_rows = [ref.num_rows for ref in tokens]
    return sum(value * rows for value, rows in zip(values, num_rows, strict=True)) / max(1, sum(num_rows))
