"""The flow of a night file: its workloads in order, each as a subflow."""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

from prefect import flow
from pydantic import Field

from engine.errors import ArtifactError, ConfigError, DatabaseError, NightError
from flows.command.run_flow import prepare_console
from flows.nights.check import find_problems
from flows.nights.night_file import NightPlan, load_night
from flows.nights.together import answer_together
from flows.workers import Night, Workers
from flows.workload_run import answer_workload, find_source, hold_night
from tasks.cascades.certificate import certify
from tasks.cascades.row_choice import RowChoice
from tasks.forecast.load_time import forecast_load
from tasks.nights.allotment import Portion, allot, begin_wave
from tasks.nights.deadline import find_deadline
from tasks.nights.graph import NightStep, Outcome, Wave, list_batches, run_waves
from tasks.publish import publish_night
from tasks.recover import recover_runs
from tasks.runs.run import isolation_mark
from tasks.runs.run_record import NEEDS_FULL
from tasks.runs.run_summary import RunSummary, show_summaries
from tasks.runs.source import Source
from tasks.workloads.workload import Workload

LOGGER = logging.getLogger("batchloom")

LEAST_SPARE = 0.05
"""Share of the night's time that must be left to take up again steps that ended early for the sake of others."""

prepare_console()


@flow(name="nightly", flow_run_name="night-{file.stem}", retries=0, persist_result=False)
def night(
    file: Path,
    full: bool = False,
    until: str = "",
    budget: str = "",
    sample: Annotated[int, Field(ge=1)] | None = None,
    lock_timeout_seconds: Annotated[float, Field(ge=0)] = 30.0,
) -> list[RunSummary]:
    """Answer the workloads of a night file, each after those whose answers it reads; returns their summaries, in the
    order in which they ran.

    Args:
        file: the night file.
        full: answer all rows again, not only new and changed ones.
        until: time at which the night ends, such as 06:00; replaces the file's until and budget.
        budget: how long the night may take, such as 90min; replaces the file's until and budget.
        sample: answer only this many rows of each workload whose rows no earlier step makes, and show them with a
            forecast for all its rows; nothing is written.
        lock_timeout_seconds: seconds to wait while another process has the database open.
    Raises:
        ConfigError, WorkloadError: the file is wrong, or an option; raised before any work.
        NightError: workloads failed; the others are answered.
    """
    begun = datetime.now().astimezone()
    plan = load_night(file)
    limits = (until, budget) if until or budget else (plan.tables.until, plan.tables.budget)
    if sample is not None and (until or budget):
        raise ConfigError("--sample has no deadline: leave out --until and --budget")
    deadline = find_deadline(*limits, begun) if sample is None else None
    with hold_night(plan.database, lock_timeout_seconds, is_written=sample is None):
        if problems := find_problems(plan, lock_timeout_seconds):
            raise ConfigError(f"{file}: {'; '.join(problems)}")
        run = NightRun(plan, full, deadline.timestamp() if deadline else None)
        with closing(run):
            if sample is not None:
                outcomes = run.show_samples(sample)
            else:
                run.allot_time()
                outcomes = run_waves(plan.steps, run.answer, run.has_time)
                outcomes |= run_waves(run.list_left(outcomes), run.answer, run.has_time)
        left = [name for name, outcome in outcomes.items() if outcome == "left"]
        if left:
            rest = NEEDS_FULL if full else ""
            LOGGER.warning("left at the deadline, for the next night%s: %s", rest, ", ".join(left))
        show_summaries(run.summaries)
        if plan.publish is not None and sample is None:
            publish_night(plan.database, plan.publish, is_lenient=bool(run.errors))
    if run.errors:
        skipped = [name for name, outcome in outcomes.items() if outcome == "skipped"]
        rest = f"; not begun, because they come after: {', '.join(skipped)}" if skipped else ""
        failed = "; ".join(f"{name}: {error}" for name, error in run.errors.items())
        message = f"{len(run.errors)} of {len(plan.steps)} workloads failed: {failed}{rest}"
        raise NightError(message, run.describe_steps(outcomes))
    return run.summaries


class NightRun:
    """The engines and the results of a night. One model is in memory, until another one has rows to answer.

    Args:
        plan: the night file.
        full: answer all rows again.
        deadline: Unix time after which no step of an engine begins; None for none.

    Attributes:
        summaries: of the workloads that did not fail, in the order in which they ran.
        errors: by name of the workload that failed.
    """

    def __init__(self, plan: NightPlan, full: bool, deadline: float | None) -> None:
        self._plan = plan
        self._deadline = deadline
        self._sources = {
            name: find_source(plan.database, model, settings.to_config(), plan.tables.planning, full, plan.attach)
            for name, (model, settings) in plan.models.items()
        }
        self._nights: dict[str, Night] = {}
        self._reserved: dict[str, float] = {}  # step to the seconds that are reserved for it until it begins
        self._least_spare = 0.0
        self.summaries: list[RunSummary] = []
        self.errors: dict[str, Exception] = {}

    def allot_time(self) -> None:
        """With a deadline and several models among the first steps, reserve time for each of these steps."""
        plan, portions, load_seconds = self._plan, list[Portion](), dict[str, float]()
        first = [step for step in plan.steps if not step.after]
        if self._deadline is None or len({step.model for step in first}) == 1:
            return
        from flows.foresight import foresee  # imported only when needed

        for step in first:
            night = self._use(step.model)
            try:
                source = replace(night.source, choices=self._choose_rows(step.name, night.source))
                found = foresee(replace(night, source=source), plan.workloads[step.name])
                if found and step.model not in load_seconds:
                    load_seconds[step.model] = forecast_load(source, night.engine)
            except Exception as error:
                LOGGER.warning("%s: no time is reserved for it: %s", step.name, " ".join(str(error).split()))
            else:
                portions += found
        models = {step.name: step.model for step in first}
        seconds_left, is_full = max(0.0, self._deadline - time.time()), self._use(first[0].model).source.full
        for name, share in allot(portions, models, load_seconds, seconds_left).items():
            self._reserved[name] = share.seconds
            prompts = f"{share.num_rows:,} of {share.num_rows + share.num_left:,} prompts"
            line = "%s: %s should fit before the deadline, %s are left for the next night%s"
            LOGGER.info(line, name, prompts, f"{share.num_left:,}", NEEDS_FULL if is_full and share.num_left else "")
        self._least_spare = 0.0 if is_full else LEAST_SPARE * seconds_left

    def list_left(self, outcomes: Mapping[str, Outcome]) -> list[NightStep]:
        """Steps to take up again: they ended early to leave time for others, and enough of it is left. None with
        `full`: a step would answer the same rows again."""
        if self._deadline is None or not self._least_spare or self._deadline - time.time() < self._least_spare:
            return []
        left = {name for name, outcome in outcomes.items() if outcome == "left"}
        steps = (step for step in self._plan.steps if step.name in left)
        return [replace(step, after=tuple(name for name in step.after if name in left)) for step in steps]

    def answer(self, wave: Wave) -> dict[str, Outcome]:
        """Run a wave's workloads, in the time that is not reserved for later steps; returns how each ended."""
        night, results = self._use(wave.model), dict[str, RunSummary | Exception]()
        if self._deadline is not None:
            night = replace(night, deadline=begin_wave(wave.steps, self._reserved, self._deadline))
        choices: dict[str, RowChoice] = {}
        for name in wave.steps:
            try:
                choices |= self._choose_rows(name, night.source)
            except Exception as error:
                results[name] = error
        night = replace(night, source=replace(night.source, choices=choices))
        workloads = [self._plan.workloads[name] for name in wave.steps if name not in results]
        for batch in list_batches(workloads, is_joint=not night.workers.settings.exchange):
            results |= answer_batch(night, batch)
        return {name: self._note(name, result) for name, result in results.items()}

    def show_samples(self, num_rows: int) -> dict[str, Outcome]:
        """Answer and show a sample of each step that reads no other step's answers; returns how each of them ended."""
        from flows.quality.sample import answer_sample  # imported only when needed

        def show(wave: Wave) -> dict[str, Outcome]:
            night, outcomes = self._use(wave.model), dict[str, Outcome]()
            for name in wave.steps:
                try:
                    source = replace(night.source, choices=self._choose_rows(name, night.source))
                    workload = self._plan.workloads[name].bind(source.checkpoint)
                    answer_sample(replace(night, source=source), workload, num_rows, keep=False)
                    outcomes[name] = "done"
                except Exception as error:
                    outcomes[name] = self._note(name, error)
            return outcomes

        if later := [step.name for step in self._plan.steps if step.after]:
            LOGGER.info("no sample of steps whose rows depend on others: %s", ", ".join(later))
        return run_waves([step for step in self._plan.steps if not step.after], show, self.has_time)

    def _choose_rows(self, name: str, source: Source) -> dict[str, RowChoice]:
        """By name of the step, the rows that a step of a cascade answers; empty if it is not of a cascade."""
        step = self._plan.cascades.get(name)
        if step is None:
            return {}
        digest, threshold = self._sources[step.model].model_digest, step.cascade.below
        if step.role == "unsure" and step.cascade.num_sampled:
            digests = (digest, source.model_digest)
            workload = replace(self._plan.workloads[name], name=step.workload).bind(source.checkpoint)
            threshold, text = certify(str(source.database), workload, step.cascade, digests, dict(source.attach))
            LOGGER.info("%s: %s", name, text)
        num_sampled = step.cascade.num_sampled
        return {name: RowChoice(role=step.role, model_digest=digest, num_sampled=num_sampled, threshold=threshold)}

    def _note(self, name: str, result: RunSummary | Exception) -> Outcome:
        if isinstance(result, Exception):
            LOGGER.error("%s: failed: %s", name, " ".join(str(result).split()))
            self.errors[name] = result
            return "failed"
        self.summaries.append(result)
        return "left" if result.status == "deadline" else "done"

    def describe_steps(self, outcomes: Mapping[str, Outcome]) -> list[dict[str, object]]:
        """For JSON, how each step ended: the summaries of runs, then the steps that failed, were skipped, or were not
        begun before the deadline; `error` says why a step failed."""
        runs = [asdict(summary) | {"error": None} for summary in self.summaries]
        errors = {name: " ".join(str(error).split()) for name, error in self.errors.items()}
        begun = {summary.workload for summary in self.summaries}
        return runs + [
            {"workload": name, "status": outcome, "error": errors.get(name)}
            for name, outcome in outcomes.items()
            if outcome in ("failed", "skipped") or name not in begun
        ]

    def has_time(self) -> bool:
        """Whether a wave may begin before the deadline."""
        return self._deadline is None or time.time() < self._deadline

    def close(self) -> None:
        """Free the loaded model and end its processes."""
        for night in self._nights.values():
            night.workers.close()

    def _use(self, model: str) -> Night:
        """The `Night` of this model, which is loaded when it has rows to answer."""
        if model not in self._nights:
            plan = self._plan
            names = [step.name for step in plan.steps if step.model == model]
            first = {step.workload for name in names if (step := plan.cascades.get(name))}  # same rows, another model
            is_isolated = any(isolation_mark(plan.database, name).exists() for name in {*names, *first})
            self._nights[model] = Night(
                source=replace(self._sources[model], is_cheapest_first=self._deadline is not None),
                engine=plan.models[model][1].to_config(plan.database),
                failures=plan.tables.failures,
                workers=Workers(plan.tables.machines, is_isolated, make_room=self.close),
                deadline=self._deadline,
                keeps_base=len({plan.workloads[name].adapter for name in names}) > 1,
            )
        return self._nights[model]


def answer_batch(night: Night, workloads: Sequence[Workload]) -> dict[str, RunSummary | Exception]:
    """Answer workloads as one batch, or one by one if that fails; gives summaries and errors by name."""
    if len(workloads) > 1:
        try:
            return run_subflow(night, workloads)
        except Exception as error:
            names = " + ".join(workload.name for workload in workloads)
            LOGGER.warning("%s: not answered as one batch, but one by one: %s", names, " ".join(str(error).split()))
        try:
            recover_runs(night.source.database)  # answers not written yet: their rows would be answered again
        except (ArtifactError, DatabaseError) as error:
            return {workload.name: error for workload in workloads}
    results: dict[str, RunSummary | Exception] = {}
    for workload in workloads:
        try:
            results |= run_subflow(night, [workload])
        except Exception as error:
            results[workload.name] = error
    return results


def run_subflow(night: Night, workloads: Sequence[Workload]) -> dict[str, RunSummary | Exception]:
    """`answer_workload`, or `answer_together` for several workloads, as a subflow of the night."""
    names = [workload.name for workload in workloads]
    kind = "workload" if len(names) == 1 else "workloads"

    @flow(name=kind, flow_run_name=" + ".join(names), retries=0, persist_result=False)
    def answer(workload_names: Sequence[str]) -> dict[str, RunSummary | Exception]:
        if len(workloads) > 1:
            return answer_together(night, workloads)
        return {workload.name: answer_workload(night, workload) for workload in workloads}

    return answer(names)
