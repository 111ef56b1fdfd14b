"""Layouts of prompts that a night chooses: ``layout = "auto"`` in a workload's ``[prompt]``."""

from collections.abc import Sequence

from flows.workload_run import Source
from tasks.layouts.parts import arrange_workload
from tasks.layouts.settle import settle_layouts
from tasks.layouts.side import LayoutJob
from tasks.workloads.workload import Workload


def settle(source: Source, workloads: Sequence[Workload], *, is_kept: bool = True) -> list[Workload]:
    """See `settle_layouts`. Steps of a cascade are asked as they are written, by both models alike.

    Args:
        source: of the rows and their prompts.
        workloads: that are planned together.
        is_kept: False: nothing is written to the database.
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
