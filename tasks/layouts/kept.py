"""Layouts that nights have chosen, kept in the database beside the answers that were made with them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from tasks.database.connection import connect, execute, transaction
from tasks.database.schema import list_relations
from tasks.layouts.parts import Order, arrange_workload, name_order, split_prompt
from tasks.workloads.row_layouts import RowLayouts
from tasks.workloads.workload import Workload

TABLE = "workload_layouts"
ROWS_TABLE = "workload_row_layouts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The kept layout of a workload: the order of the parts for all rows without an order of their own."""

    order: Order
    has_rows: bool


Choice = tuple[Workload, Order, pa.Table]
"""A layout that a night has chosen: the workload as in its file, the order of its template's parts for rows without an
order of their own, and orders of the night's rows, see `RowLayouts.chosen`."""


def read_kept(database: str | Path, workload: Workload, lock_timeout_seconds: float = 30.0) -> Kept | None:
    """The layout that is kept for the workload's template; None if no night has chosen one, or may choose.

    Args:
        database, workload: DuckDB file, and the workload as in its file.
        lock_timeout_seconds: to wait while another process has the database open.
    """
    if workload.prompt.layout == "written":
        return None
    key = {"workload": workload.name, "template_digest": _digest(workload)}
    with connect(database, read_only=True, lock_timeout_seconds=lock_timeout_seconds) as connection:
        relations = list_relations(connection)
        if TABLE not in relations:
            return None
        found = execute(connection, "layouts/read_layout", key).fetchall()
        order = tuple(found[0][0]) if found else ()
        if not found or sorted(order) != list(split_prompt(workload).written):
            return None
        counted = execute(connection, "layouts/count_row_layouts", key) if ROWS_TABLE in relations else None
        return Kept(order=order, has_rows=counted is not None and counted.fetchall() != [(0,)])


def use_kept(database: str | Path, workload: Workload, lock_timeout_seconds: float = 30.0) -> Workload:
    """The workload in its kept layout, in which its newest answers were made; else as written. See `read_kept`."""
    return lay_out(workload, read_kept(database, workload, lock_timeout_seconds))


def lay_out(workload: Workload, kept: Kept | None, chosen: pa.Table | None = None) -> Workload:
    """The workload in a layout.

    Args:
        workload, kept: as in its file, and the layout; None: as written.
        chosen: rows with orders that are not kept yet, see `RowLayouts.chosen`.
    """
    if kept is None or (not kept.has_rows and chosen is None):
        return arrange_workload(workload, kept.order if kept else ())
    parts = split_prompt(workload)
    layouts = RowLayouts(
        templates={name_order(order): parts.arrange(order) for order in parts.orders},
        template_digest=_digest(workload),
        has_kept=kept.has_rows,
        chosen=chosen,
    )
    return arrange_workload(workload, kept.order, layouts)


def keep_choices(database: str | Path, choices: Sequence[Choice], counts: Mapping[str, int]) -> None:
    """Replace the kept layouts of these workloads and rows, in one transaction; other rows keep their orders.

    Args:
        counts: num_computed_tokens, the prompt tokens that the night's plan of all workloads planned together computes
            with these layouts, and num_written_tokens, the same with the layouts as written.
    Raises:
        DatabaseError: the database is locked or cannot be written.
    """
    with connect(database) as connection, transaction(connection):
        execute(connection, "layouts/create_layouts")
        execute(connection, "layouts/create_row_layouts")
        for workload, order, rows in choices:
            key = {"workload": workload.name, "template_digest": _digest(workload)}
            execute(connection, "layouts/delete_layout", {"workload": workload.name})
            template = arrange_workload(workload, order).prompt.template
            row = {**key, "part_order": order, "template": template, **counts, "chosen_at": datetime.now(UTC)}
            execute(connection, "write/insert_rows", {"rows": [row]}, table=TABLE)
            connection.register("chosen_rows", rows)
            execute(connection, "layouts/delete_row_layouts", key)
            execute(connection, "layouts/insert_row_layouts", key)
            connection.unregister("chosen_rows")


def _digest(workload: Workload) -> str:
    """Digest of the template as written, because each template has layouts of its own."""
    prompt = workload.prompt
    return hashlib.sha256(json.dumps([prompt.system, prompt.chat, prompt.template]).encode()).hexdigest()
