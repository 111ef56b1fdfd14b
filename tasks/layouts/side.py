"""One of several workloads that are planned together: its rows, their present layout, and possible layouts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from engine.planning.plan import SharingStats
from tasks.layouts.choose import find_most_frequent
from tasks.layouts.estimate import PartTexts, RowOrders, read_part_texts
from tasks.layouts.kept import Kept, lay_out, read_kept
from tasks.layouts.parts import Order, Parts, name_order, split_prompt
from tasks.plan_prefix import write_plan
from tasks.read import ReadResult, read
from tasks.runs.source import Source
from tasks.storage.artifact import open_parquet
from tasks.storage.plan_file import read_plan_summary
from tasks.storage.row_numbers import write_joined
from tasks.tokenize import tokenize
from tasks.workloads.workload import Workload

PARTITION_TOKENS = 1 << 60
"""All rows are in one partition: how a night cuts its work does not matter for a layout."""

MOST_SHOWN = 3
"""Most orders of a workload's rows that a message names."""


def read_in_layout(source: Source, workload: Workload, folder: Path) -> ReadResult:
    """The rows of a workload in its layout. See `tasks.read.read`; `folder` is made here."""
    folder.mkdir(parents=True)
    return read.fn(source, workload, folder)


def measure_sharing(
    source: Source, workloads: Sequence[Workload], folder: Path, *, cache: Path | None = None
) -> SharingStats:
    """Prompt tokens of all rows in one plan. Prompts are made as in a night; raises what that raises.

    Args:
        workloads: in their layouts.
        folder: made here, for temporary files.
        cache: database whose cache keeps the tokens for the night; None: they are not kept.
    """
    cache = cache or folder / "cache"
    prompts = []
    for number, workload in enumerate(workloads):
        requests = read_in_layout(source, workload, folder / str(number)).requests
        prompts.append(tokenize.fn(replace(source, database=cache), requests, workload))
    joint = write_joined(prompts, folder / "joint.parquet")
    plan = write_plan(joint, folder / "plan.parquet", source.method, PARTITION_TOKENS, 1, source.block_size)
    return read_plan_summary(plan).sharing


def can_move(workload: Workload) -> bool:
    """Whether nights may choose the workload's layout."""
    return workload.prompt.layout == "auto" and not split_prompt(workload).fixed_because


def describe_orders(parts: Parts, orders: RowOrders) -> str:
    """The labels of the parts in the rows' orders, the most frequent order first."""
    if not parts.parts:
        return ""
    different, num_rows = np.unique(orders, axis=0, return_counts=True)
    names = [parts.describe(tuple(different[number])) for number in np.argsort(-num_rows, kind="stable")]
    if len(names) == 1:
        return names[0]
    counts = sorted(num_rows.tolist(), reverse=True)
    shown = [f"{name} ({count:,} rows)" for name, count in zip(names, counts, strict=True)][:MOST_SHOWN]
    return "; ".join(shown) + (f"; {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else "")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Side:
    """A workload with its rows to answer.

    Attributes:
        workload: as in its file.
        kept: the layout that earlier nights have chosen; None for none.
        found: the rows, in the present layout.
    """

    workload: Workload
    parts: Parts
    kept: Kept | None
    can_move: bool
    found: ReadResult

    @classmethod
    def read(cls, source: Source, workload: Workload, folder: Path) -> "Side":
        """Read the kept layout and the rows.

        Args:
            workload, folder: as in its file; for the rows, made here.
        """
        kept = read_kept(source.database, workload)
        found = read_in_layout(source, lay_out(workload, kept), folder)
        parts = split_prompt(workload)
        return cls(workload=workload, parts=parts, kept=kept, can_move=can_move(workload), found=found)

    @property
    def num_rows(self) -> int:
        """Rows with a prompt."""
        return len(self._read_rows())

    @property
    def is_settled(self) -> bool:
        """Whether the present layout was chosen by an earlier night, or has answers."""
        return self.kept is not None or self.found.num_already_done > 0

    @property
    def order(self) -> Order:
        """The present order of rows without an order of their own."""
        return self.kept.order if self.kept else self.parts.written

    @property
    def choices(self) -> list[Order]:
        """The orders that all rows may have, the present `order` first."""
        others = self.parts.orders if self.can_move else ()
        return [self.order, *(order for order in others if order != self.order)]

    @property
    def is_uniform(self) -> bool:
        """Whether all rows must have the same order. Labels are encoded once for all rows, after the text that ends
        every prompt, so there must be such a text."""
        has_ending = self.workload.prompt.chat or bool(self.parts.tail.strip())
        return not self.can_move or (self.workload.kind.has_labels and not has_ending)

    def read_texts(self) -> PartTexts:
        """The texts of the rows with a prompt."""
        return read_part_texts(self.found.requests, self.workload, self.parts)

    def read_orders(self) -> RowOrders:
        """The present order of each row with a prompt."""
        rows = self._read_rows()
        if "row_layout" not in rows.column_names:
            return np.tile(np.array(self.order, np.int8), (len(rows), 1))
        names = rows.column("row_layout").combine_chunks().fill_null("").dictionary_encode()
        found = [tuple(map(int, name.split(","))) if name else self.order for name in names.dictionary.to_pylist()]
        orders: RowOrders = np.array(found, np.int8).reshape(-1, len(self.order))[names.indices.to_numpy()]
        return orders

    def _read_rows(self) -> pa.Table:
        """Key and order of each row with a prompt."""
        with open_parquet(self.found.requests) as file:
            columns = [name for name in ("error", "row_layout", *self.workload.key) if name in file.schema_arrow.names]
            return file.read(columns=columns).filter(pc.field("error").is_null())

    def lay_out(self, orders: RowOrders) -> tuple[Workload, Order]:
        """The workload with each row with a prompt in its order, and the workload's order for all other rows: the most
        frequent one, or if the layout is settled the present one, so that answered rows do not change."""
        if not self.can_move:
            return lay_out(self.workload, self.kept), self.order
        base = self.order if self.is_settled else find_most_frequent(orders)
        has_rows = self.kept is not None and self.kept.has_rows
        chosen = self.list_rows(orders, base)
        is_alike = chosen.column("part_order").null_count == len(chosen) and not has_rows
        return lay_out(self.workload, Kept(order=base, has_rows=has_rows), None if is_alike else chosen), base

    def list_rows(self, orders: RowOrders, base: Order) -> pa.Table:
        """The table for `RowLayouts.chosen`: the order of each row with a prompt, where it is not the workload's."""
        table = self._read_rows()
        different, numbers = np.unique(orders, axis=0, return_inverse=True)
        names = pa.array([None if tuple(order) == base else name_order(order) for order in different.tolist()])
        columns = {f"key_{number}": table.column(name) for number, name in enumerate(self.workload.key)}
        return pa.table(columns | {"part_order": names.cast(pa.string()).take(pa.array(numbers.reshape(-1)))})
