"""``batchloom advise``: prompt tokens that the order of a template's parts costs, for a workload or a night file."""

import argparse
import json
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from engine.config import EngineConfig
from engine.errors import BatchloomError, ConfigError
from flows.command.failure import EXIT_FAILED, fail
from flows.command.run_flow import plain_log
from flows.nights.night_file import load_night
from flows.quality.text_page import make_table
from flows.settings import PlanSettings, find_attachments
from flows.workload_run import describe_source
from tasks.database.connection import connect
from tasks.layouts.advice import LayoutAdvice, advise_layouts
from tasks.nights.graph import plan_waves
from tasks.runs.source import Source
from tasks.workloads.workload import Workload, load_workload

LOCK_TIMEOUT_SECONDS = 5.0


def list_jobs(options: argparse.Namespace) -> Iterator[tuple[Source, list[Workload]]]:
    """The workloads that are planned together: each wave of a night file, or the one workload. Raises `BatchloomError`
    if a file, the database or the model cannot be used."""
    if not _is_night(options.workload):
        workload = load_workload(options.workload)
        if options.database is None or options.model is None:
            raise ConfigError("a workload needs --database and --model; a night file names them itself")
        attach = find_attachments(tuple(options.attach))
        yield _describe(options.database, options.model, EngineConfig(), PlanSettings(), attach), [workload]
        return
    if options.database is not None or options.model is not None or options.attach:
        raise ConfigError("a night file names its database, models and attachments itself")
    plan = load_night(Path(options.workload))
    for wave in plan_waves(plan.steps):
        model, engine = plan.models[wave.model]
        source = _describe(plan.database, model, engine.to_config(), plan.tables.planning, plan.attach)
        yield source, [plan.workloads[name] for name in wave.steps]


def _describe(
    database: Path, model: str, engine: EngineConfig, planning: PlanSettings, attach: Mapping[str, str]
) -> Source:
    with connect(database, read_only=True, lock_timeout_seconds=LOCK_TIMEOUT_SECONDS):
        pass  # a wrong path fails here
    return describe_source(database, model, engine, planning, True, attach)


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
        table = make_table(title, ("layout", "parts"), ("computed", "as written"))
        for cost in advice.costs:
            parts = "; ".join(order or "(fixed)" for order in cost.orders)
            ratio = cost.num_computed_tokens / written - 1 if written else 0.0
            table.add_row(
                cost.name if cost.name != parts else "", parts, f"{cost.num_computed_tokens:,}", f"{ratio:+z.1%}"
            )
        console.print(table)
    for sentence in advice.sentences:
        console.print(f"- {sentence}", markup=False, highlight=False)
    console.print()


def main(arguments: Sequence[str] | None = None) -> int:
    """Advise on the workload or night in `arguments` (the process's own if None); returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="batchloom advise",
        description="Show how many prompt tokens a workload computes with its order of fields and instructions, and "
        "with the best order. All rows of its query count, answered or not; nothing is written, no model is loaded.",
    )
    parser.add_argument(
        "workload", metavar="WORKLOAD", help="name of a shipped workload, its TOML file, or a night file"
    )
    parser.add_argument("--database", type=Path, help="DuckDB file with the rows")
    parser.add_argument("--model", help="checkpoint folder, GGUF file or hub id, whose tokenizer is used")
    parser.add_argument(
        "--attach", action="append", default=[], metavar="NAME=PATH", help="what the query may read as NAME"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(arguments)
    try:
        found = []
        with plain_log(sys.stderr):
            for source, workloads in list_jobs(options):
                try:
                    found.append(advise_layouts(source, [each.bind(source.checkpoint) for each in workloads]))
                except BatchloomError as error:
                    if not _is_night(options.workload):
                        raise
                    names, why = tuple(each.name for each in workloads), " ".join(str(error).split())
                    advice = LayoutAdvice(workloads=names, num_rows=0, sentences=(f"Cannot be looked at now: {why}",))
                    found.append(advice)
    except BatchloomError as error:
        return fail(f"advise: {' '.join(str(error).split())}", EXIT_FAILED)
    if options.json:
        print(json.dumps([asdict(advice) for advice in found], indent=1))
    else:
        for advice in found:
            show_advice(advice, Console())
    return 0
