"""One workload from table to table: read, tokenize, plan, infer, write."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.limits import check_weights
from engine.model.loading.checkpoint import checkpoint_digest, is_plain, resolve_checkpoint
from engine.planning.planner import PlanMethod
from flows.report import report_run
from flows.settings import PlanSettings, WorkerSettings
from flows.workers import Workers, compute
from tasks.partitions.attempt import ENDED
from tasks.partitions.part import count_reasons
from tasks.plan_prefix import plan_prefix
from tasks.read import ReadResult, read, read_answer_length
from tasks.runs.infer_job import FailurePolicy, InferJob, Member
from tasks.runs.run import Run, set_isolation
from tasks.runs.run_record import RunRecord, RunSummary
from tasks.storage.artifact import ArtifactRef
from tasks.storage.plan_file import read_plan_summary
from tasks.tokenize import read_max_model_len, tokenize
from tasks.workloads.workload import Workload
from tasks.write import write

if TYPE_CHECKING:
    from tasks.cascades.row_choice import RowChoice

LOGGER = logging.getLogger("batchloom")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where rows come from and how their prompts are made and grouped; the same for all workloads of a flow run.

    Attributes:
        block_size, is_cheapest_first: see `tasks.plan_prefix.write_plan`.
        choices: by workload, of those that answer some of their rows, as a step of a cascade does.
    """

    database: Path
    model: str
    checkpoint: Path
    model_digest: str
    max_model_len: int
    planning: PlanSettings
    full: bool
    attach: Mapping[str, str] = field(default_factory=dict)
    block_size: int | None = None
    is_cheapest_first: bool = False
    choices: Mapping[str, "RowChoice"] = field(default_factory=dict)

    @classmethod
    def find(
        cls,
        database: Path,
        model: str,
        engine: EngineConfig,
        planning: PlanSettings,
        full: bool,
        attach: Mapping[str, str],
    ) -> "Source":
        """Look the model up. See `flows.nightly.nightly` for the parameters.

        Raises:
            ModelError: it cannot be used.
        """
        checkpoint = resolve_checkpoint(model)
        max_model_len = read_max_model_len(checkpoint, engine.max_model_len)
        if not is_plain(json.loads((checkpoint / "config.json").read_bytes())):
            from flows.proof import prove_architecture  # seconds to import

            prove_architecture(checkpoint)
        check_weights(engine, checkpoint)
        return cls(
            database=database,
            model=model,
            checkpoint=checkpoint,
            model_digest=checkpoint_digest(checkpoint),
            max_model_len=max_model_len,
            planning=planning,
            full=full,
            attach=attach,
            block_size=engine.shared_block_size,
        )

    def plan_method(self, workload: Workload) -> PlanMethod:
        """How prompts are grouped. In an encoder every token sees the whole text, so prefixes cannot be shared."""
        if workload.kind.is_pooled:
            from engine.encoding.families import is_encoder

            if is_encoder(self.checkpoint):
                return "none"
        return self.planning.method


@dataclass(frozen=True, slots=True, kw_only=True)
class Night:
    """What all workloads of one night have in common besides their source: who computes, and what failures mean.

    Attributes:
        deadline: Unix time after which no step of the engine begins; None for none.
        keeps_base: see `Engine.load`.
    """

    source: Source
    engine: EngineConfig
    failures: FailurePolicy
    machines: WorkerSettings
    workers: Workers
    deadline: float | None = None
    keeps_base: bool = False

    def make_job(
        self,
        workload: Workload,
        run: Run,
        plan: ArtifactRef,
        expected_output_tokens: int | None,
        members: tuple[Member, ...] = (),
    ) -> InferJob:
        """What the workers are told of a run. See `InferJob`."""
        source, exchange = self.source, None
        if url := self.machines.exchange:
            from tasks.runs.run_exchange import Exchange  # most nights are of one host

            exchange = Exchange.below(url, run.folder, source.model)
        return InferJob(
            run_folder=run.folder,
            plan=plan,
            workload=workload,
            checkpoint=str(source.checkpoint),
            model_digest=source.model_digest,
            engine=self.engine,
            failures=self.failures,
            expected_output_tokens=expected_output_tokens,
            exchange=exchange,
            deadline=self.deadline,
            members=members,
            keeps_base=self.keeps_base,
        )


def answer_workload(night: Night, workload: Workload) -> RunSummary:
    """Read, tokenize, plan, infer, write: one workload from table to table.

    However the run ends, what is answered is written, by `stop_run` or by the next night's `recover_runs`.
    """
    source, workload = night.source, workload.bind(night.source.checkpoint)
    if workload.prompt.layout == "auto":
        from flows.layouts import settle

        (workload,) = settle(source, [workload])
    run = Run.create(source.database, begin_record(night, workload))
    num_left = 0
    try:
        _, plan = read_and_plan(source, workload, run)
        if plan is not None:
            num_left = infer(night, workload, run, plan)
    except BaseException as error:
        from tasks.recover import stop_run

        stop_run(run, workload, error)
        raise
    return write_and_report(night, workload, run, num_left)


def begin_record(night: Night, workload: Workload) -> RunRecord:
    """The record of a run of the night that starts now."""
    source = night.source
    config = {
        "engine": asdict(night.engine),
        "planning": source.planning.model_dump(),
        "failures": asdict(night.failures),
        "machines": night.machines.model_dump(),
        "workload": {"source": workload.source, "key": list(workload.key)}
        | ({} if workload.adapter is None else {"adapter": workload.adapter.folder}),
        "full": source.full,
        "attach": dict(source.attach),
    }
    return RunRecord.begin(workload, source.model, source.model_digest, config)


def write_and_report(night: Night, workload: Workload, run: Run, num_left: int = 0) -> RunSummary:
    """End a run that came through: its answers into the tables, then its page.

    Args:
        night: whose database it is.
        workload: what was answered.
        run: ended and finished.
        num_left: rows that its deadline has left.
    """
    if num_left:
        run.end("deadline", f"{num_left:,} rows were not reached before the deadline")
    else:
        run.end("completed")
    summary = write(run, workload)
    run.finish()
    LOGGER.info(summary.text)
    if summary.num_rows:
        report_run(night.source.database, summary.run_id, run.artifacts.get("plan"))
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
    found = read_rows(source, workload, run)
    return found, plan_requests(source, workload, run, found.requests) if found.num_selected else None


def read_rows(source: Source, workload: Workload, run: Run) -> ReadResult:
    """Rows to requests. See `read_and_plan`."""
    with run.measure("read"):
        attach, choice = dict(source.attach), source.choices.get(workload.name)
        given = (str(source.database), workload, source.model_digest, run.folder)
        found = read(*given, full=source.full, attach=attach, choice=choice)
    run.note({"requests": found.requests}, num_already_done=found.num_already_done)
    if found.num_selected:
        LOGGER.info("%s: %s rows to answer", workload.name, f"{found.num_selected:,}")
    return found


def plan_requests(source: Source, workload: Workload, run: Run, requests: ArtifactRef) -> ArtifactRef:
    """Requests to tokens and plan; returns the plan. See `read_and_plan`."""
    database, planning = str(source.database), source.planning
    tokens = tokenize_rows(source, workload, run, requests)
    with run.measure("plan"):
        given = (workload.kind.max_answer_tokens, source.block_size, source.is_cheapest_first)
        plan = plan_prefix(database, tokens, source.plan_method(workload), planning.partition_tokens, *given)
    run.note({"plan": plan})
    return plan


def tokenize_rows(source: Source, workload: Workload, run: Run, requests: ArtifactRef) -> ArtifactRef:
    """Requests to tokens. See `read_and_plan`."""
    limit = source.max_model_len
    with run.measure("tokenize"):
        tokens = tokenize(str(source.database), requests, workload, str(source.checkpoint), source.model_digest, limit)
    run.note({"tokens": tokens})
    return tokens


def infer(night: Night, workload: Workload, run: Run, plan: ArtifactRef) -> int:
    """Each partition of the plan to parts, by the night's workers; raises where too many rows failed.

    Args:
        run: keeps parts, seconds and notes.
        plan: the plan artifact.
    Returns:
        how many rows the deadline has left.
    """
    source, summary = night.source, read_plan_summary(plan)
    sharing = summary.sharing
    run.note(token_saving_ratio=sharing.token_saving_ratio, best_token_saving_ratio=sharing.best_token_saving_ratio)
    LOGGER.info("%s: %s", workload.name, summary.text)
    answer = read_answer_length(source.database, workload)
    job = night.make_job(workload, run, plan, answer.expected_output_tokens)
    parts = compute(night, job, summary, {run: 1.0}, answer.num_tokens)
    return summary.num_rows if parts is None else summary.num_rows - check_failures(night, workload, parts)


def check_failures(night: Night, workload: Workload, parts: Sequence[ArtifactRef]) -> int:
    """How many rows are in a run's parts; raises where too many of them failed. See `FailurePolicy.check`."""
    reasons, num_tried = count_reasons(parts), sum(part.num_rows for part in parts)
    set_isolation(night.source.database, workload.name, is_needed=ENDED.reason in reasons)
    night.failures.check(reasons, num_tried)
    return num_tried
