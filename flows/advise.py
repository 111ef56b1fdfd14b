"""``batchloom advise``: prompt tokens that the order of a template's parts costs, for a workload or a night file."""

import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, replace
from json import dumps
from pathlib import Path

from rich.console import Console

from engine.config import EngineConfig
from engine.errors import BatchloomError, ConfigError
from engine.model.loading.hub import resolve_head
from flows.command.run_flow import plain_log
from flows.nights.night_file import load_night
from flows.settings import Attachments, PlanSettings, find_attachments
from flows.text_page import make_console, make_table
from flows.workload_run import describe_source
from tasks.database.connection import connect
from tasks.layouts.advice import LayoutAdvice, advise_layouts
from tasks.nights.graph import list_batches, plan_waves
from tasks.runs.source import Source
from tasks.workloads.workload import Workload, load_workload

LOCK_TIMEOUT_SECONDS = 5.0


def list_jobs(
    workload: str, database: Path | None, model: str | None, attach: Attachments
) -> Iterator[tuple[Source, list[Workload], Collection[str]]]:
    """The workloads that are planned together: each batch of a night file, or the one workload; and the names of those
    whose layout is never chosen. See `advise`. Raises `BatchloomError` if a file or the model cannot be used."""
    if not _is_night(workload):
        loaded = load_workload(workload)
        if database is None or model is None:
            raise ConfigError("a workload needs --database and --model; a night file names them itself")
        yield _describe(database, model, EngineConfig(), PlanSettings(), find_attachments(attach)), [loaded], ()
        return
    if database is not None or model is not None or attach:
        raise ConfigError("a night file names its database, models and attachments itself")
    plan = load_night(Path(workload))
    for wave in plan_waves(plan.steps):
        model, engine = plan.models[wave.model]
        source = _describe(plan.database, model, engine.to_config(), plan.tables.planning, plan.attach)
        workloads = [plan.workloads[name] for name in wave.steps]
        for batch in list_batches(workloads, is_joint=not plan.tables.machines.exchange):
            yield source, batch, plan.cascades.keys()


def _describe(
    database: Path, model: str, engine: EngineConfig, planning: PlanSettings, attach: Mapping[str, str]
) -> Source:
    with connect(database, read_only=True, lock_timeout_seconds=LOCK_TIMEOUT_SECONDS):
        pass  # a wrong path fails here
    return replace(describe_source(resolve_head(model), database, model, engine, planning, attach), full=True)


def _is_night(name: str) -> bool:
    try:
        keys = tomllib.loads(Path(name).read_text(encoding="utf-8-sig")) if name.endswith(".toml") else {}
    except (OSError, ValueError):
        return False  # `load_workload` reports the error
    return not keys.keys().isdisjoint(("database", "models", "workload"))


def show_advice(advice: LayoutAdvice, console: Console) -> None:
    """Print the layouts of workloads that are planned together, with the prompt tokens that each computes."""
    console.rule(f"{' + '.join(advice.workloads)}: {advice.num_rows:,} rows", align="left", style="none")
    if advice.costs:
        written = advice.costs[0].num_computed_tokens
        title = f"Prompt tokens to compute, of {advice.num_prompt_tokens:,}"
        table = make_table(title, ("layout", "parts"), ("computed", "difference"))
        for cost in advice.costs:
            parts = "; ".join(order or "(fixed)" for order in cost.orders)
            ratio = cost.num_computed_tokens / written - 1 if written else 0.0
            table.add_row(
                cost.name if cost.name != parts else "", parts, f"{cost.num_computed_tokens:,}", f"{ratio:+z.1%}"
            )
        console.print(table)
    for sentence in advice.sentences:
        console.print(f"- {sentence}")
    console.print()


def advise(
    workload: str,
    database: Path | None = None,
    model: str | None = None,
    attach: Attachments = (),
    json: bool = False,
) -> int:
    """Print how many prompt tokens a workload, or each batch of a night, computes with its layouts, and with the best.

    Args:
        workload: name of a shipped workload, its TOML file, or a night file; all rows of its query count, answered or
            not; nothing is written, no model is loaded
        database: DuckDB file with the rows; a night file names its own
        model: checkpoint folder, GGUF file or hub id, whose tokenizer is used; a night file names its own
        attach: NAME=PATH of what the query may read as NAME
        json: print JSON instead of tables
    """
    found = []
    with plain_log(sys.stderr):
        for source, workloads, fixed in list_jobs(workload, database, model, attach):
            try:
                found.append(advise_layouts(source, [each.bind(source.checkpoint) for each in workloads], fixed))
            except BatchloomError as error:
                if not _is_night(workload):
                    raise
                names, why = tuple(each.name for each in workloads), " ".join(str(error).split())
                sentence = f"Cannot be looked at now: {why}"
                found.append(LayoutAdvice(workloads=names, num_rows=0, sentences=(sentence,)))
    if json:
        print(dumps([asdict(advice) for advice in found], indent=1))
    else:
        for advice in found:
            show_advice(advice, make_console())
    return 0
