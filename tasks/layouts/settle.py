"""Chooses the layouts of a night: those of earlier nights, or new ones that save enough."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tasks.layouts.choose import WORTH_SPLITTING, list_ways, spread_orders
from tasks.layouts.estimate import count_bytes
from tasks.layouts.kept import Choice, keep_choices, lay_out, use_kept
from tasks.layouts.parts import arrange_workload, split_prompt
from tasks.layouts.side import Side, can_move, describe_orders, measure_sharing
from tasks.runs.source import Source
from tasks.storage.scratch_folder import scratch_folder
from tasks.workloads.workload import Workload

LOGGER = logging.getLogger("batchloom")

WORTH_CHANGING = 0.2
"""Share of the night's prompt tokens that a new layout must save if the present one was chosen or has answers."""


def settle_layouts(
    source: Source, workloads: Sequence[Workload], *, is_kept: bool = True, keeps_tokens: bool = True
) -> list[Workload]:
    """The workloads in the layouts of this night; those with ``layout = "auto"`` get the kept layout or a new one.

    Only rows without an answer count; answered rows keep their order. A better layout replaces one that was chosen
    before, or has answers, only if the plan computes fewer tokens with it by `WORTH_CHANGING`. Steps of a cascade keep
    the written layout: both models get the same prompt. Raises what reading the rows and making their prompts raise.

    Args:
        workloads: that are planned together.
        is_kept: False: nothing is written to the database.
        keeps_tokens: False: nor are prompts written to its cache, which keeps them for the night.
    """
    workloads = [arrange_workload(each, ()) if each.name in source.choices else each for each in workloads]
    if all(workload.prompt.layout == "written" for workload in workloads):
        return workloads
    for workload in workloads:
        if workload.prompt.layout == "auto" and (why := split_prompt(workload).fixed_because):
            LOGGER.info("%s: the layout stays as it is written: %s", workload.name, why)
    laid_out = [use_kept(source.database, workload) for workload in workloads]
    if not any(map(can_move, workloads)):
        return laid_out
    with scratch_folder("layouts") as folder:
        sides = [Side.read(source, each, folder / str(number)) for number, each in enumerate(workloads)]
        busy = {number: side for number, side in enumerate(sides) if side.num_rows}
        if not any(side.can_move for side in busy.values()):
            return laid_out
        chosen, choices, counts = _choose(
            source, list(busy.values()), folder, source.database if keeps_tokens else None
        )
    if choices and is_kept:
        keep_choices(source.database, choices, counts)
        return [use_kept(source.database, workload) for workload in workloads]
    for number, workload in zip(busy, chosen, strict=True):
        laid_out[number] = workload
    return laid_out


def _choose(
    source: Source, sides: Sequence[Side], folder: Path, cache: Path | None
) -> tuple[list[Workload], list[Choice], Mapping[str, int]]:
    """The workloads in their layouts, the choices to keep, and the prompt tokens of a plan of all workloads. Layouts
    are compared by their texts first; only if another one looks better, by the plans of prompts made in both."""

    def count(workloads: Sequence[Workload], name: str) -> int:
        return measure_sharing(source, workloads, folder / name, cache=cache).num_processed_tokens

    texts, own = [side.read_texts() for side in sides], [side.read_orders() for side in sides]
    laid_out = [lay_out(side.workload, side.kept) for side in sides]
    best, num_tokens, num_before = own, 0, 0
    is_uniform = [side.is_uniform for side in sides]
    for number, orders in enumerate(list_ways(texts, [side.choices for side in sides], is_uniform)):
        moved = [side for side, old, new in zip(sides, own, orders, strict=True) if not np.array_equal(old, new)]
        limit = 1 - WORTH_CHANGING if any(side.is_settled for side in moved) else 1.0
        if not moved or count_bytes(texts, orders) >= limit * count_bytes(texts, own):
            continue
        if not num_before:
            num_tokens = num_before = count(laid_out, "before")
        other = [side.lay_out(each)[0] for side, each in zip(sides, orders, strict=True)]
        num_other = count(other, f"way-{number}")
        if num_other < min(limit * num_before, (1 - WORTH_SPLITTING) * num_tokens if number else num_before):
            laid_out, best, num_tokens = other, orders, num_other
    chosen = [
        (side, new)
        for side, old, new in zip(sides, own, best, strict=True)
        if side.can_move and (side.kept is None or not np.array_equal(old, new))
    ]
    if not chosen:
        return laid_out, [], {}
    as_written = spread_orders(texts, [side.parts.written for side in sides])
    written = [side.lay_out(orders)[0] for side, orders in zip(sides, as_written, strict=True)]
    counts = {
        "num_computed_tokens": num_tokens or count(laid_out, "chosen"),
        "num_written_tokens": count(written, "written"),
    }
    choices = []
    for side, rows in chosen:
        layout, base = describe_orders(side.parts, rows), side.lay_out(rows)[1]
        shown = (side.workload.name, layout, *(f"{count:,}" for count in counts.values()))
        LOGGER.info("%s: layout %s: %s prompt tokens, %s as written", *shown)
        choices.append((side.workload, base, side.list_rows(rows, base)))
    return laid_out, choices, counts
