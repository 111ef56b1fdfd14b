"""The layouts of a night: those kept from earlier nights, or new ones where these save enough."""

import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path

from engine.planning.choose_prefixes import PlanMethod
from tasks.layouts.kept import Choice, keep_choices, read_order
from tasks.layouts.parts import Order, arrange_workload, split_prompt
from tasks.layouts.search import Candidate, LayoutSearch
from tasks.read import ReadResult, read_requests
from tasks.workloads.workload import Workload

LOGGER = logging.getLogger("batchloom")

WORTH_CHANGING = 0.2
"""Of the night's prompt tokens: what another layout has to save, with all that is answered anew because of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutJob:
    """What layouts are chosen for.

    Attributes:
        database: with the rows, and the layouts of earlier nights.
        checkpoint: whose tokenizer counts.
        model_digest: of the checkpoint; answers of another model do not count as done.
        max_model_len: tokens of the longest prompt plus answer.
        method: of the plans.
        full: rows that are answered are asked again.
        attach: what queries may read beside the database.
    """

    database: Path
    checkpoint: Path
    model_digest: str
    max_model_len: int
    method: PlanMethod
    full: bool = False
    attach: Mapping[str, str] = field(default_factory=dict)

    def read(self, workload: Workload, folder: Path, *, full: bool) -> ReadResult:
        """The rows of a workload. See `tasks.read.read_requests`.

        Args:
            workload: in the layout in which it is asked.
            folder: for them; made here.
            full: those that are answered, too.
        """
        folder.mkdir()
        return read_requests(self.database, workload, self.model_digest, folder, full=full, attach=self.attach)


def settle_layouts(job: LayoutJob, workloads: Sequence[Workload], *, is_kept: bool = True) -> list[Workload]:
    """The workloads in the layouts of this night, those with ``layout = "auto"`` in the kept or a new one.

    A new layout is taken where none was chosen and nothing answered before, or where the plan computes fewer tokens
    with it by `WORTH_CHANGING`, though rows that were answered are then answered again.

    Args:
        job: what they are chosen for.
        workloads: that are planned together.
        is_kept: False: nothing is written to the database.
    Raises:
        what reading the rows and making their prompts raise.
    """
    sides = [_Side.find(job.database, workload) for workload in workloads]
    with tempfile.TemporaryDirectory(prefix="batchloom-layouts-") as folder:
        busy = []
        if any(side.can_move for side in sides):
            for number, side in enumerate(sides):
                side.found = job.read(side.arrange(), Path(folder, str(number)), full=job.full)
            busy = [side for side in sides if side.found and side.found.num_selected > side.found.num_errors]
        if any(side.can_move for side in busy):
            choices = _choose(job, busy, Path(folder))
            if choices and is_kept:
                keep_choices(job.database, choices)
    return [side.arrange() for side in sides]


@dataclass(slots=True)
class _Side:
    """One of the workloads that are planned together.

    Attributes:
        workload: as its file has it.
        kept: order that an earlier night chose.
        order: of this night.
        can_move: whether the night may choose it.
        found: rows to answer in the kept layout.
    """

    workload: Workload
    kept: Order | None
    order: Order
    can_move: bool
    found: ReadResult | None = None

    @classmethod
    def find(cls, database: Path, workload: Workload) -> "_Side":
        parts, is_auto = split_prompt(workload), workload.prompt.layout == "auto"
        if is_auto and parts.fixed_because:
            LOGGER.info("%s: the layout stays as it is written: %s", workload.name, parts.fixed_because)
        can_move = is_auto and not parts.fixed_because
        kept = read_order(database, workload) if can_move else None
        return cls(workload, kept, kept or parts.written, can_move)

    @property
    def num_done(self) -> int:
        return self.found.num_already_done if self.found else 0

    def arrange(self) -> Workload:
        return arrange_workload(self.workload, self.order)

    def candidate(self, rows: ReadResult | None = None) -> Candidate:
        rows = rows or self.found
        assert rows is not None
        others = permutations(sorted(self.order)) if self.can_move else ()
        orders = [self.order, *(order for order in others if order != self.order)]
        return Candidate(workload=self.workload, requests=rows.requests, orders=orders)


def _choose(job: LayoutJob, sides: Sequence[_Side], folder: Path) -> list[Choice]:
    """Set the order of each side; returns what is to be kept of it."""
    search = LayoutSearch(job.checkpoint, job.max_model_len, job.method, folder)
    asked = candidates = [side.candidate() for side in sides]
    before, best = [side.order for side in sides], search.find_best(candidates)
    num_before = num_after = search.count_tokens(candidates, before)
    if best != before:
        moved = [number for number, order in enumerate(best) if order != before[number]]
        asked = list(candidates)
        for number in moved:
            if sides[number].num_done and not job.full:
                rows = job.read(sides[number].arrange(), folder / f"all-{number}", full=True)
                asked[number] = sides[number].candidate(rows)
        is_first = not any(sides[number].num_done or sides[number].kept for number in moved)
        num_after = search.count_tokens(asked, best)
        if num_after < num_before * (1.0 if is_first else 1 - WORTH_CHANGING):
            for side, order in zip(sides, best, strict=True):
                side.order = order
        else:
            asked, num_after = candidates, num_before
    chosen = [side for side in sides if side.can_move and side.order != side.kept]
    if not chosen:
        return []
    written = [split_prompt(side.workload).written for side in sides]
    num_written = search.count_tokens(asked, written)
    for side in chosen:
        layout = split_prompt(side.workload).describe(side.order)
        LOGGER.info("%s: layout %s: %s prompt tokens, %s as written", side.workload.name, layout,
                    f"{num_after:,}", f"{num_written:,}")  # fmt: skip
    return [
        Choice(workload=side.workload, order=side.order, num_tokens=num_after, num_written_tokens=num_written)
        for side in chosen
    ]
