"""What the order of fields and instructions costs workloads, over all rows of their queries."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

from engine.errors import BatchloomError
from tasks.layouts.estimate import count_bytes, read_part_texts
from tasks.layouts.kept import read_order
from tasks.layouts.parts import Order, split_prompt
from tasks.layouts.search import Candidate, LayoutSearch
from tasks.layouts.settle import LayoutJob
from tasks.workloads.workload import Workload

MOST_SHOWN = 6
"""Orders of a single workload, beside its own."""

WORTH_SAYING = 0.05
"""Of the prompt tokens: less is not worth a change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCost:
    """One way to lay the prompts out.

    Attributes:
        name: "as written", "kept", "best", or an order.
        orders: labels of the parts of each workload, first to last; empty where nothing can move.
        num_computed_tokens: prompt tokens of one plan of all rows.
    """

    name: str
    orders: tuple[str, ...]
    num_computed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutAdvice:
    """What is known of workloads that are planned together.

    Attributes:
        workloads: their names.
        num_rows: of all queries, rows with an error apart.
        num_prompt_tokens: of all rows, nothing shared.
        costs: as written first.
        sentences: what could be done, and what cannot.
    """

    workloads: tuple[str, ...]
    num_rows: int
    num_prompt_tokens: int = 0
    costs: tuple[LayoutCost, ...] = ()
    sentences: tuple[str, ...] = ()


def advise_layouts(job: LayoutJob, workloads: Sequence[Workload]) -> LayoutAdvice:
    """Count what the layouts of workloads cost that are answered together, as written and as their templates allow.

    Args:
        job: whose rows count, all of each query.
        workloads: planned together.
    Raises:
        what reading the rows and making their prompts raise.
    """
    with tempfile.TemporaryDirectory(prefix="batchloom-advise-") as folder:
        candidates, num_rows = [], 0
        for number, workload in enumerate(workloads):
            found = job.read(workload, Path(folder, str(number)), full=True)
            num_rows += found.num_selected - found.num_errors
            orders = list(permutations(split_prompt(workload).written))
            candidates.append(Candidate(workload=workload, requests=found.requests, orders=orders))
        names = tuple(workload.name for workload in workloads)
        if not num_rows:
            return LayoutAdvice(workloads=names, num_rows=0, sentences=("There are no rows that could be answered.",))
        search = LayoutSearch(job.checkpoint, job.max_model_len, job.method, Path(folder))
        ways = _list_ways(job, search, candidates)
        costs = tuple(
            LayoutCost(
                name=name,
                orders=tuple(each.parts.describe(order) for each, order in zip(candidates, orders, strict=True)),
                num_computed_tokens=search.count_tokens(candidates, orders),
            )
            for name, orders in ways.items()
        )
        num_prompt_tokens = search.count_tokens(candidates, ways["as written"], method="none")
    return LayoutAdvice(
        workloads=names,
        num_rows=num_rows,
        num_prompt_tokens=num_prompt_tokens,
        costs=costs,
        sentences=tuple(_say(workloads, {cost.name: cost for cost in costs}, ways)),
    )


def _list_ways(job: LayoutJob, search: LayoutSearch, candidates: Sequence[Candidate]) -> dict[str, list[Order]]:
    """Names of the layouts to compare, and the order of each workload in them."""
    written = [each.orders[0] for each in candidates]
    ways = {"as written": written}
    kept = [
        read_order(job.database, each.workload) if each.workload.prompt.layout == "auto" else None
        for each in candidates
    ]
    if any(kept):
        ways["kept"] = [order or own for order, own in zip(kept, written, strict=True)]
    ways["best"] = search.find_best(candidates)
    if len(candidates) == 1:
        (only,) = candidates
        texts = read_part_texts(only.requests, only.workload, only.parts)
        by_bytes = sorted(only.orders, key=lambda order: count_bytes([texts], [order]))
        shown = [order for order in by_bytes if [order] not in ways.values()][:MOST_SHOWN]
        ways |= {only.parts.describe(order): [order] for order in shown}
    return ways


def _say(workloads: Sequence[Workload], costs: dict[str, LayoutCost], ways: dict[str, list[Order]]) -> list[str]:
    said = []
    own = costs.get("kept", costs["as written"]).num_computed_tokens
    saved = 1 - costs["best"].num_computed_tokens / own if own else 0.0
    for workload, written, best in zip(workloads, ways["as written"], ways["best"], strict=True):
        parts = split_prompt(workload)
        if parts.fixed_because:
            said.append(f"{workload.name}: its layout stays as it is written: {parts.fixed_because}.")
        elif best == written or saved < WORTH_SAYING:
            said.append(f"{workload.name}: its layout is right as it is.")
        elif workload.prompt.layout == "auto":
            said.append(f"{workload.name}: a night may choose {parts.describe(best)}.")
        else:
            said.append(f'{workload.name}: layout = "auto" in its [prompt] lets a night choose {parts.describe(best)}.')
    heads = {(each.prompt.system if each.prompt.chat else "", split_prompt(each).head) for each in workloads}
    if len(heads) > 1:
        said.append(
            "Their prompts begin with different system messages or words, behind which nothing is shared: give "
            "instructions a part with a label in the template, such as 'Task: ...', which may follow the document."
        )
    return said


def explain_failure(names: Sequence[str], error: BatchloomError) -> LayoutAdvice:
    """In place of an advice: why there is none."""
    reason = " ".join(str(error).split())
    return LayoutAdvice(workloads=tuple(names), num_rows=0, sentences=(f"Cannot be looked at now: {reason}",))
