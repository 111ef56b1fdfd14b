"""One workload from table to table: read, tokenize, plan, infer, write."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from engine.config import EngineConfig
from engine.encoding.families import is_encoder
from engine.errors import DatabaseError
from engine.limits import check_weights
from engine.model.loading.checkpoint import checkpoint_digest, is_plain, read_json, resolve_checkpoint
from flows.report import report_run
from flows.settings import PlanSettings
from flows.workers import Night
from tasks.database.connection import connect
from tasks.partitions.attempt import ENDED
from tasks.partitions.part import count_reasons
from tasks.plan_prefix import plan_prefix
from tasks.prompts.known_tokens import check_prompt
from tasks.prompts.text_codec import check_tokenizer
from tasks.prompts.thinking import check_thinking
from tasks.read import ReadResult, read, read_answer_length
from tasks.recover import prune_cache, recover_runs, stop_run
from tasks.runs.infer_job import InferJob, JobMember
from tasks.runs.progress import PlannedWork
from tasks.runs.run import Run, hold_database, isolation_mark, protect_result_storage
from tasks.runs.run_summary import RunSummary
from tasks.runs.source import Source
from tasks.storage.artifact import ArtifactRef, runs_folder
from tasks.storage.plan_file import PlanSummary, read_plan_summary
from tasks.tokenize import check_room, read_max_model_len, tokenize
from tasks.workloads.workload import Workload, load_workload
from tasks.write import write

LOGGER = logging.getLogger("batchloom")

FEWEST_TOKENS_TO_PREDICT = 50_000
"""Prompt tokens to compute below which a plan is not predicted: computing them is faster than measuring the device."""


def find_source(
    database: Path, model: str, engine: EngineConfig, planning: PlanSettings, full: bool, attach: Mapping[str, str]
) -> Source:
    """Find the model's files; `ModelError` if the engine cannot compute them. See `flows.nightly.nightly`."""
    folder = resolve_checkpoint(model)
    source = replace(describe_source(folder, database, model, engine, planning, attach), full=full)
    if not is_plain(read_json(source.checkpoint / "config.json")):
        from flows.proof import prove_architecture  # takes seconds to import

        prove_architecture(source.checkpoint)
    check_weights(engine, source.checkpoint)
    check_tokenizer(source.checkpoint)
    return source


def describe_source(
    folder: Path, database: Path, model: str, engine: EngineConfig, planning: PlanSettings, attach: Mapping[str, str]
) -> Source:
    """See `find_source`; without a check that the engine can compute the model, whose files are in `folder`."""
    # In an encoder each token attends to the whole text: prompts share nothing.
    can_share = is_plain(read_json(folder / "config.json")) or not is_encoder(folder)
    return Source(
        database=database,
        model=model,
        checkpoint=folder,
        model_digest=checkpoint_digest(folder),
        max_model_len=read_max_model_len(folder, engine.max_model_len),
        method=planning.method if can_share else "none",
        partition_tokens=planning.partition_tokens,
        block_size=engine.shared_block_size if can_share else None,
        attach=attach,
    )


def load_workloads(
    names: Sequence[str], source: Source, adapter: Path | None, lock_timeout_seconds: float
) -> list[Workload]:
    """The workloads of these `names`, bound to the model and checked before any work. See `flows.nightly.nightly`."""
    chosen = [load_workload(name).with_adapter(adapter).bind(source.checkpoint) for name in names]
    has_copy = check_tokenizer(source.checkpoint)
    for workload in chosen:
        check_room(workload, source.max_model_len)
        if workload.kind.thinking:
            check_thinking(workload, source.checkpoint)
        if not has_copy:
            check_prompt(workload, source.checkpoint)
    if len(set(names)) < len(names) or any("/" in workload.source for workload in chosen):  # not just shipped ones
        from tasks.nights.check_steps import check_in_turn, check_labels  # imported only when needed

        check_labels(chosen[1:], source.checkpoint)  # those of the first one are read at once
        check_in_turn(source.database, chosen, source.attach, lock_timeout_seconds)
    return chosen


@contextmanager
def hold_night(database: Path, lock_timeout_seconds: float, *, is_written: bool = True) -> Iterator[None]:
    """Lock the database, waiting `lock_timeout_seconds` for others, and first finish what earlier runs could not.
    See `hold_database`, `recover_runs`, whose errors are raised; `DatabaseError` for a wrong path before any folder."""
    with connect(database, read_only=True, lock_timeout_seconds=lock_timeout_seconds):
        pass
    with hold_database(database, is_written=is_written):
        protect_result_storage()
        if is_written and any(runs_folder(database).glob("*-*")):
            for run in recover_runs(database):
                report_run(database, run.record.run_id)
        if (runs_folder(database) / "cache").exists():
            prune_cache(database)
        yield


def answer_workload(night: Night, workload: Workload) -> RunSummary:
    """Read, tokenize, plan, infer, write: one workload from table to table.

    If a stage fails, `stop_run` writes the answers so far; if the process dies, the next night's `recover_runs` does.
    """
    source, workload = night.source, workload.bind(night.source.checkpoint)
    if workload.prompt.layout == "auto":
        from tasks.layouts.settle import settle_layouts  # imported only when needed

        (workload,) = settle_layouts(source, [workload])
    run, num_left = begin_run(night, workload), 0
    try:
        found = read_rows(source, workload, run)
        if found.num_selected:
            tokens = tokenize_rows(source, workload, run, found.requests)
            if night.failures.max_invalid_rate < 1:
                from tasks.runs.failure_rate import check_input  # imported only when needed

                check_input(night.failures, workload, tokens, found.num_selected + found.num_already_done)
            plan = plan_rows(source, workload, run, tokens, night.num_engines)
            num_left = infer_rows(night, workload, run, plan)
    except BaseException as error:
        stop_run(run, workload, error)
        raise
    end_run(run, num_left)
    return write_rows(workload, run)


def begin_run(night: Night, workload: Workload, root: Path | None = None) -> Run:
    """A run of the workload that starts now, its folder and record on disk. See `Run.begin`."""
    source, questions = night.source, workload.kind.question_digests
    config = {
        "engine": asdict(night.engine),
        "planning": {"method": source.method, "partition_tokens": source.partition_tokens},
        "failures": asdict(night.failures),
        "machines": night.workers.settings.model_dump(),
        "workload": {"source": workload.source, "key": list(workload.key), "columns": dict(workload.kind.columns)}
        | ({} if workload.adapter is None else {"adapter": workload.adapter.folder})
        | ({} if not questions else {"questions": list(questions.values())}),
        "full": source.full,
        "attach": dict(source.attach),
    }
    return Run.begin(source, workload, config, root)


def read_rows(source: Source, workload: Workload, run: Run) -> ReadResult:
    """The rows to answer, as requests. See `tasks.read.read`."""
    with run.measure("read"):
        found = read(source, workload, run.folder)
    run.note({"requests": found.requests}, num_already_done=found.num_already_done)
    if found.num_selected:
        reasons = ", ".join(f"{num_rows:,} {reason}" for reason, num_rows in found.reasons.most_common())
        rows = f"{found.num_selected:,} rows to answer"
        LOGGER.info("%s: %s", workload.name, rows if source.full else f"{rows}: {reasons}")
    if found.num_hidden:
        line = "%s: %s rows have the key of another row and another text: latest_%s shows one answer of each key"
        LOGGER.warning(line, workload.name, f"{found.num_hidden:,}", workload.output.table)
    return found


def tokenize_rows(source: Source, workload: Workload, run: Run, requests: ArtifactRef) -> ArtifactRef:
    """The requests' prompts as token ids. See `tasks.tokenize.write_tokens`."""
    with run.measure("tokenize"):
        tokens = tokenize(source, requests, workload)
    run.note({"tokens": tokens})
    return tokens


def plan_rows(source: Source, workload: Workload, run: Run, tokens: ArtifactRef, num_engines: int) -> ArtifactRef:
    """The prompts grouped by shared prefix and cut into partitions. See `tasks.plan_prefix.write_plan`."""
    with run.measure("plan"):
        plan = plan_prefix(source, tokens, workload.kind.max_answer_tokens, num_engines)
    run.note({"plan": plan})
    return plan


def infer_rows(night: Night, workload: Workload, run: Run, plan: ArtifactRef, *, is_whole: bool = True) -> int:
    """Infer every partition of a plan; returns how many prompts the deadline left. See `infer_plan`, `count_left`."""
    summary = read_plan_summary(plan)
    sharing = summary.sharing
    run.note(token_saving_ratio=sharing.token_saving_ratio, best_token_saving_ratio=sharing.best_token_saving_ratio)
    LOGGER.info("%s: %s", workload.name, summary.text)
    answer = read_answer_length(night.source.database, workload)
    member = JobMember(run_folder=run.folder, workload=workload, expected_output_tokens=answer.expected_output_tokens)
    parts = infer_plan(night, night.make_job(plan, member), summary, [run], answer.num_tokens)
    return summary.num_rows if parts is None else count_left(night, workload, parts, summary.num_rows, is_whole)


def infer_plan(
    night: Night, job: InferJob, summary: PlanSummary, runs: Sequence[Run], num_answer_tokens: float
) -> list[ArtifactRef] | None:
    """Predict a long plan, then infer its partitions; returns their parts, or None if the model cannot load in time.

    Args:
        job, summary: what all partitions have in common, and their plan in numbers.
        runs: those with rows in the plan.
        num_answer_tokens: expected length of an answer.
    """
    load_seconds, pace = 0.0, None
    if night.deadline is not None:
        from flows.prediction import find_load_seconds  # imported only when needed

        if (found := find_load_seconds(night, night.deadline, job.title)) is None:
            return None
        load_seconds = found
    is_short = night.deadline is None and summary.sharing.num_processed_tokens < FEWEST_TOKENS_TO_PREDICT
    if summary.num_rows and not is_short and night.source.method != "none":
        from flows.prediction import predict_night  # imported only when needed

        pace = predict_night(night, runs, job, summary, load_seconds)
    work = PlannedWork(
        num_rows=summary.num_rows,
        num_prompt_tokens=summary.sharing.num_processed_tokens,
        answer_tokens=num_answer_tokens - 1,  # decode steps: prefill gives the first token
    )
    with measure_all(runs, "infer"):
        parts = night.workers.infer_partitions(job, summary.dispatch_order, work, pace)
    if pace is not None:
        for run in runs:
            pace.note(run)
    return parts


def measure_all(runs: Iterable[Run], stage: str) -> ExitStack:
    """`Run.measure` of all runs at once."""
    stack = ExitStack()
    for run in runs:
        stack.enter_context(run.measure(stage))
    return stack


def count_left(night: Night, workload: Workload, parts: list[ArtifactRef], num_rows: int, is_whole: bool = True) -> int:
    """How many planned prompts are in no part; raises if too many of the others failed. See `FailurePolicy.check`. The
    need for crash isolation ends only where all open rows were planned (`is_whole`) and tried."""
    reasons, num_tried = count_reasons(parts), sum(part.num_rows for part in parts)
    mark = isolation_mark(night.source.database, workload.name)
    if ENDED.reason in reasons:
        mark.touch(mode=0o600)
    elif is_whole and num_tried == num_rows:
        mark.unlink(missing_ok=True)
    night.failures.check(reasons, num_tried)
    return num_rows - num_tried


def end_run(run: Run, num_left: int) -> None:
    """End a run that did not fail; the deadline left `num_left` prompts unanswered."""
    if num_left:
        run.end("deadline", f"{num_left:,} prompts were not reached before the deadline")
    else:
        run.end("completed")


def write_rows(workload: Workload, run: Run) -> RunSummary:
    """Write the answers of a run that has ended to the tables, then its report page."""
    try:
        summary = write(run, workload)
    except DatabaseError as error:
        raise DatabaseError(f"{error}; the answers stay in {run.folder}, and the next run writes them") from error
    run.finish()
    LOGGER.info(summary.text)
    if summary.num_rows:
        report_run(run.database, summary.run_id)
    return summary
