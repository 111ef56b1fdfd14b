"""Chooses the layout of prompts for workloads with ``layout = "auto"`` in their ``[prompt]``."""

from collections.abc import Sequence

from flows.workload_run import Source
from tasks.layouts.parts import arrange_workload
from tasks.layouts.settle import settle_layouts
from tasks.layouts.side import LayoutJob
from tasks.workloads.workload import Workload


def settle(source: Source, workloads: Sequence[Workload], *, is_kept: bool = True) -> list[Workload]:
    """Choose layouts, see `settle_layouts`. Steps of a cascade keep the written one: both models get the same prompt.

    Args:
        workloads: planned together.
        is_kept: whether the chosen layouts are written to the database.
    """
    workloads = [arrange_workload(each, ()) if each.name in source.choices else each for each in workloads]
    if all(workload.prompt.layout == "written" for workload in workloads):
        return list(workloads)
    job = LayoutJob(
        database=source.database,
        checkpoint=source.checkpoint,
        model_digest=source.model_digest,
        max_model_len=source.max_model_len,
        method=source.planning.method,
        block_size=source.block_size,
        full=source.full,
        attach=source.attach,
        cache=source.database,
    )
    return settle_layouts(job, workloads, is_kept=is_kept)
