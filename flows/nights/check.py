"""Errors of a night, found in seconds without loading a model: ``batchloom check``."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

from pydantic import Field, validate_call

from engine.config import EngineConfig
from engine.errors import BatchloomError
from engine.limits import check_weights
from engine.model.loading.checkpoint import GGUF_TENSORS, checkpoint_digest, is_plain, read_json
from engine.model.loading.hub import resolve_head
from flows.command.failure import EXIT_FAILED, EXIT_USAGE, fail
from flows.command.run_flow import plain_log
from flows.nights.night_file import ModelTable, NightPlan, NightTables, WorkloadTable, load_night
from flows.settings import Attachments, EngineSettings, WorkerSettings, find_attachments
from tasks.nights.check_steps import check_labels, check_tables, find_query_problems
from tasks.nights.deadline import find_deadline
from tasks.nights.graph import chain_steps
from tasks.prompts.known_tokens import check_prompt
from tasks.prompts.text_codec import TextCodec
from tasks.prompts.thinking import check_thinking
from tasks.publish import check_target
from tasks.tokenize import check_room, read_max_model_len
from tasks.workloads.workload import Workload, load_workload

DEFAULT = ("snippets", "ranking")
"""Workloads to check if none are named, as `flows.nightly.nightly` answers them."""


def find_problems(plan: NightPlan, lock_timeout_seconds: float = 30.0) -> list[str]:
    """The errors that would end the night or one of its steps, one line each: of the copy for readers, models and their
    settings, prompts, labels and room for thoughts with each model's tokenizer, queries, output tables. Another process
    that writes to an attached file is waited for."""
    problems: list[str] = []
    if plan.publish is not None:
        try:
            check_target(plan.database, plan.publish, plan.attach)
        except BatchloomError as error:
            problems.append(str(error))
    workloads = dict(plan.workloads)
    for name, (model, settings) in plan.models.items():
        answered = {step.name: plan.workloads[step.name] for step in plan.steps if step.model == name}
        try:
            found, bound = check_model(model, settings.to_config(), answered, plan.tables.machines)
            problems += found
            workloads |= bound
        except (BatchloomError, OSError) as error:
            where = f"[models.{name}]: " if name else ""  # a night file names its models
            problems.append(f"{where}{' '.join(str(error).split())}")
    problems = problems or list(_find_copies(plan))
    try:
        problems += find_query_problems(plan.database, plan.steps, workloads, plan.attach, lock_timeout_seconds)
    except BatchloomError as error:
        problems.append(str(error))
    return problems


def check_model(
    model: str, config: EngineConfig, workloads: Mapping[str, Workload], machines: WorkerSettings
) -> tuple[list[str], dict[str, Workload]]:
    """Check a model and the workloads that it answers.

    Args:
        model: checkpoint folder, GGUF file or hub id.
        config: of its engine.
        workloads: by name of their step.
        machines: where it computes.
    Returns:
        the errors of workloads, one line each, and the other workloads, bound to the model.
    Raises:
        BatchloomError: the model or a setting cannot be used for any workload.
    """
    checkpoint = resolve_head(model)
    max_model_len = read_max_model_len(checkpoint, config.max_model_len)
    if not is_plain(read_json(checkpoint / "config.json")):
        from flows.proof import prove_architecture  # takes seconds to import

        prove_architecture(checkpoint)
    if _has_weights(checkpoint):
        check_weights(config, checkpoint)
    machines.check_host(config, checkpoint)
    TextCodec.load(checkpoint)  # a tokenizer that cannot be read is an error of the model
    problems, bound = [], {}
    for step, unbound in workloads.items():
        try:
            bound[step] = check_workload(unbound, checkpoint, max_model_len)
        except BatchloomError as error:
            reason = str(error).removeprefix(f"workload {unbound.name!r}: ")
            problems.append(f"workload {unbound.name!r} with model {model}: {reason}")
    return problems, bound


def check_workload(unbound: Workload, checkpoint: Path, max_model_len: int) -> Workload:
    """The workload as the model answers it. Raises the error of one that it cannot answer.

    Args:
        unbound: the workload.
        checkpoint, max_model_len: the model's folder, and its longest prompt plus answer in tokens.
    """
    workload = unbound.bind(checkpoint)
    check_prompt(workload, checkpoint)
    if workload.kind.thinking:
        check_thinking(workload, checkpoint)
    check_labels([workload], checkpoint)
    check_room(workload, max_model_len)
    return workload


def _has_weights(checkpoint: Path) -> bool:
    """Whether a model's weights are here; those of a hub id may not be."""
    return (checkpoint / GGUF_TENSORS).is_file() or any(checkpoint.glob("*.safetensors"))


def _find_copies(plan: NightPlan) -> Iterator[str]:
    """Cascades between two copies of one model, whose answers cannot be told apart: a row that the first has answered
    would count as the second's."""
    for step in (step for step in plan.cascades.values() if step.role == "first"):
        names = (step.model, step.cascade.to)
        checkpoints = [resolve_head(plan.models[name][0]) for name in names]
        if all(map(_has_weights, checkpoints)) and len(set(map(checkpoint_digest, checkpoints))) == 1:
            both = f"models {names[0]!r} and {names[1]!r}"
            yield f"workload {step.workload!r}: cascade: {both} are copies of one model"


def plan_workloads(
    database: Path,
    model: str,
    workloads: Sequence[str],
    adapter: Path | None,
    engine: EngineSettings,
    machines: WorkerSettings,
    publish: Path | None,
    attach: Attachments,
) -> NightPlan:
    """The night of workloads that have no night file: each is a step, which may read the answers of those before it.
    See `flows.nightly.nightly`, and `load_night` for errors."""
    loaded = [load_workload(name).with_adapter(adapter) for name in workloads]
    check_tables(loaded)
    steps, by_name = chain_steps(loaded)
    return NightPlan(
        tables=NightTables(
            database=str(database),
            models={"": ModelTable(path=model)},
            workload=tuple(WorkloadTable(file=name) for name in workloads),
            machines=machines,
        ),
        database=database,
        models={"": (model, engine)},
        steps=steps,
        workloads=by_name,
        cascades={},
        attach=find_attachments(attach),
        publish=publish,
    )


@validate_call
def check(
    file: Path | None = None,
    database: Path | None = None,
    model: str = "",
    workloads: Annotated[tuple[str, ...], Field(min_length=1)] = DEFAULT,
    adapter: Path | None = None,
    engine: EngineSettings = EngineSettings(),  # noqa: B008 - frozen
    machines: WorkerSettings = WorkerSettings(),  # noqa: B008 - frozen
    publish: Path | None = None,
    attach: Attachments = (),
    show: Annotated[int, Field(ge=1)] | None = None,
) -> int:
    """Print the errors of a night file, or of workloads with a database and a model, one line each; returns the exit
    code.

    Args:
        file: the night file.
        database: DuckDB file with the input tables, for workloads without a night file.
        model: checkpoint folder, GGUF file or Hugging Face hub id of a language model; its weights are not fetched.
        workloads: what to check: the name of a shipped workload or the path of a TOML file.
        adapter: folder of a LoRA adapter of the model, for workloads whose file names none.
        engine: how the model computes.
        machines: which processes and machines compute.
        publish: file that is to get a copy of the database at the end of the night.
        attach: NAME=PATH of a folder, DuckDB or SQLite file that the SQL of workloads may read under this name.
        show: where nothing is wrong, print this many prompts of each workload as the model gets them.
    """
    given = (database, model, workloads, adapter, engine, machines, publish, attach)
    if file is not None and given != (None, "", DEFAULT, None, EngineSettings(), WorkerSettings(), None, ()):
        return fail("check: only --show goes with a night file, whose tables hold all settings", EXIT_USAGE)
    with plain_log(sys.stderr):
        if file is not None:
            plan = load_night(file)
            find_deadline(plan.tables.until, plan.tables.budget, datetime.now().astimezone())
        elif database is None or not model:
            return fail("check: NIGHT.toml is missing, or --database and --model of workloads", EXIT_USAGE)
        else:
            plan = plan_workloads(database, model, workloads, adapter, engine, machines, publish, attach)
        problems = find_problems(plan)
        for problem in problems:
            fail(f"check: {problem}", EXIT_FAILED)
        if problems:
            return EXIT_FAILED
        what = str(file) if file is not None else ", ".join(workloads)
        print(f"{what}: nothing is wrong; steps: {len(plan.steps)}, models: {len(plan.models)}")
        if show is not None:
            from flows.nights.shown_prompts import show_prompts  # imported only when needed

            for text in show_prompts(plan, show):
                print(f"\n{text}")
    return 0
