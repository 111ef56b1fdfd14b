"""The first prompts of each workload as its model gets them: ``batchloom check --show N``."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq

from engine.errors import DatabaseError
from engine.model.loading.hub import resolve_head
from flows.nights.night_file import NightPlan
from flows.quality.sample_page import show_value
from flows.text_page import escape_controls
from flows.workload_run import describe_source
from sql import statement
from tasks.database.connection import fill_identifiers, quote_literal
from tasks.layouts.parts import arrange_workload
from tasks.layouts.settle import settle_layouts
from tasks.layouts.side import read_in_layout
from tasks.nights.graph import list_batches, plan_waves
from tasks.prompts.text_codec import TextCodec
from tasks.runs.source import Source
from tasks.storage.scratch_folder import scratch_folder
from tasks.tokenize import write_tokens
from tasks.workloads.workload import Workload


def show_prompts(plan: NightPlan, num_prompts: int) -> Iterator[str]:
    """The first prompts of each workload, answered or not, as text for a terminal, in the layouts of the night. A
    workload whose rows earlier steps have yet to make has a line. Nothing is written, no weights are fetched.

    Args:
        plan: without problems, see `flows.nights.check.find_problems`.
        num_prompts: of each workload.
    """
    for wave in plan_waves(plan.steps):
        model, settings = plan.models[wave.model]
        engine, planning = settings.to_config(), plan.tables.planning
        source = describe_source(resolve_head(model), plan.database, model, engine, planning, plan.attach)
        steps = {name: plan.workloads[name].bind(source.checkpoint) for name in wave.steps}
        workloads = [arrange_workload(step, ()) if name in plan.cascades else step for name, step in steps.items()]
        for batch in list_batches(workloads, is_joint=not plan.tables.machines.exchange):
            try:
                for workload in settle_layouts(source, batch, is_kept=False, keeps_tokens=False):
                    yield from _show_workload(replace(source, full=True), workload, num_prompts)
            except DatabaseError as error:
                if not any(step.after for step in plan.steps if step.name in wave.steps):
                    raise
                names = " + ".join(workload.name for workload in batch)
                yield f"--- {names}: no prompts before earlier steps have run: {' '.join(str(error).split())}"


def _show_workload(source: Source, workload: Workload, num_prompts: int) -> Iterator[str]:
    first = {"requests_sql": quote_literal(workload.requests_sql), "num_rows": str(num_prompts)}
    limited = replace(workload, requests_sql=fill_identifiers(statement("read/first_requests"), first))
    with scratch_folder("check") as folder:
        requests = read_in_layout(source, limited, folder / "rows").requests
        tokens = write_tokens(requests, folder / "tokens.parquet", limited, source.checkpoint, source.max_model_len)
        keys = pq.read_table(requests.path, columns=list(workload.key)).to_pylist()
        prompts = pq.read_table(tokens.path).to_pylist()[:num_prompts]
    tokenizer, questions = TextCodec.load(Path(source.checkpoint)).tokenizer, list(workload.kind.question_digests)
    if not prompts:
        yield f"--- {workload.name}: no rows"
    for prompt in prompts:
        row, number = divmod(prompt["row_id"], len(workload.kind.suffixes))
        names = [f"{name} {show_value(value)}" for name, value in keys[row].items()]
        names += [f"question {questions[number]}"] if questions and not prompt["error"] else []
        shown = f"no prompt: {show_value(prompt['error'])}"
        if not prompt["error"]:
            text = tokenizer.decode(prompt["token_ids"], skip_special_tokens=False)
            shown = f"{len(prompt['token_ids']):,} tokens\n{text}"
        yield escape_controls(f"--- {workload.name}, {', '.join(names)}: {shown}")
