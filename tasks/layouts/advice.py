"""Compares the layouts of workloads over all rows of their queries, and gives advice."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from tasks.layouts.choose import WORTH_SPLITTING, find_orders, order_rows, spread_orders
from tasks.layouts.estimate import RowOrders
from tasks.layouts.parts import Parts, arrange_workload
from tasks.layouts.side import Side, describe_orders, measure_sharing
from tasks.runs.source import Source
from tasks.storage.scratch_folder import scratch_folder
from tasks.workloads.workload import Workload

AS_WRITTEN = "as written"

MOST_SHOWN = 6
"""Most orders of a single workload that are shown beside its own."""

LEAST_GAIN = 0.05
"""Share of the prompt tokens below which a saving is not mentioned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCost:
    """A layout of the prompts and its cost.

    Attributes:
        name: "as written", "kept", "one order" (the best one for all rows of a workload), "order per row", or an order.
        orders: of each workload, the labels of its parts, first to last; empty if its parts cannot move.
        num_computed_tokens: prompt tokens that one plan of all rows computes.
    """

    name: str
    orders: tuple[str, ...]
    num_computed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutAdvice:
    """Layouts of workloads that are planned together.

    Attributes:
        num_rows: of all queries, without rows that have an error.
        num_prompt_tokens: of all rows, without sharing.
        costs: "as written" first.
    """

    workloads: tuple[str, ...]
    num_rows: int
    num_prompt_tokens: int = 0
    costs: tuple[LayoutCost, ...] = ()
    sentences: tuple[str, ...] = ()


def advise_layouts(source: Source, workloads: Sequence[Workload], cascaded: Container[str] = ()) -> LayoutAdvice:
    """Count the prompt tokens of workloads that are answered together, in their own and in other layouts. Raises what
    reading the rows and making their prompts raise.

    Args:
        cascaded: names of workloads that are steps of a cascade, which keep the written layout.
    """
    with scratch_folder("advise") as folder:
        sides = []
        for number, workload in enumerate(workloads):
            is_step = workload.name in cascaded
            side = Side.read(source, arrange_workload(workload, ()) if is_step else workload, folder / str(number))
            why = "both models of a cascade get the same prompt"
            parts = Parts(head=workload.prompt.template, fixed_because=why) if is_step else side.parts
            sides.append(replace(side, parts=parts, can_move=not parts.fixed_because))
        names, num_rows = tuple(workload.name for workload in workloads), sum(side.num_rows for side in sides)
        if not num_rows:
            return LayoutAdvice(workloads=names, num_rows=0, sentences=("There are no rows that could be answered.",))
        ways = _list_ways(sides)
        sharing = {}
        for number, (name, orders) in enumerate(ways.items()):
            laid_out = [side.lay_out(each)[0] for side, each in zip(sides, orders, strict=True)]
            sharing[name] = measure_sharing(source, laid_out, folder / f"way-{number}")
    costs = tuple(
        LayoutCost(
            name=name,
            orders=tuple(describe_orders(side.parts, each) for side, each in zip(sides, orders, strict=True)),
            num_computed_tokens=sharing[name].num_processed_tokens,
        )
        for name, orders in ways.items()
    )
    return LayoutAdvice(
        workloads=names,
        num_rows=num_rows,
        num_prompt_tokens=sharing[AS_WRITTEN].num_logical_tokens,
        costs=costs,
        sentences=tuple(_list_sentences(sides, costs)),
    )


def _list_ways(sides: Sequence[Side]) -> dict[str, list[RowOrders]]:
    """The layouts to compare: name to the order of every row."""
    texts = [side.read_texts() for side in sides]
    written = [side.parts.written for side in sides]
    ways = {AS_WRITTEN: spread_orders(texts, written)}
    if any(side.kept for side in sides):
        ways["kept"] = [side.read_orders() for side in sides]
    choices = [side.parts.orders if side.can_move else (side.order,) for side in sides]
    one = find_orders(texts, choices)
    ways["one order"] = spread_orders(texts, one)
    if not all(side.is_uniform for side in sides):
        ways["order per row"] = order_rows(texts, ways["one order"], [side.is_uniform for side in sides])
    if len(sides) == 1:
        parts = sides[0].parts
        num_bytes = texts[0].count_alone(parts.orders)
        by_bytes = [order for _, order in sorted(zip(num_bytes, parts.orders, strict=True))]
        shown = [order for order in by_bytes if order not in (*one, *written)][:MOST_SHOWN]
        ways |= {parts.describe(order): spread_orders(texts, [order]) for order in shown}
    return ways


def _list_sentences(sides: Sequence[Side], costs: Sequence[LayoutCost]) -> list[str]:
    sentences = []
    by_name = {cost.name: cost for cost in costs}
    so_far = by_name.get("kept", by_name[AS_WRITTEN])
    best, each = by_name["one order"], by_name.get("order per row")
    if each is not None and each.num_computed_tokens < (1 - WORTH_SPLITTING) * best.num_computed_tokens:
        best = each
    saved = 1 - best.num_computed_tokens / so_far.num_computed_tokens if so_far.num_computed_tokens else 0.0
    cheapest = min(costs, key=attrgetter("num_computed_tokens"))
    least = (1 - LEAST_GAIN) * min(best.num_computed_tokens, so_far.num_computed_tokens)
    for side, own, other in zip(sides, so_far.orders, best.orders, strict=True):
        name = side.workload.name
        if side.parts.fixed_because:
            sentences.append(f"{name}: its layout stays as it is written: {side.parts.fixed_because}.")
        elif cheapest.num_computed_tokens < least:  # of a single workload
            why = "its parts begin alike and end differently, which the choice of a night does not see"
            sentences.append(f"{name}: write its template in the order {cheapest.orders[0]}: {why}.")
        elif own == other or saved < LEAST_GAIN:
            sentences.append(f"{name}: its layout is right as it is.")
        elif side.workload.prompt.layout == "auto":
            sentences.append(f"{name}: a night may choose {other}.")
        else:
            sentences.append(f'{name}: layout = "auto" in its [prompt] lets a night choose {other}.')
    prompts = [side.workload.prompt for side in sides]
    words = [side.parts.head.partition("{")[0] for side in sides]  # before the first field
    heads = {(each.system if each.chat else "", head) for each, head in zip(prompts, words, strict=True)}
    if len(heads) > 1:
        sentences.append(
            "Their prompts begin with different system messages or words, behind which nothing is shared: give "
            "instructions a part with a label in the template, such as 'Task: ...', which may follow the document."
        )
    return sentences
