"""Rows whose prompt has its parts in another order than their workload's template."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import duckdb
import pyarrow as pa

from sql import statement

if TYPE_CHECKING:
    from tasks.workloads.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowLayouts:
    """Which orders rows may have, and which rows have one; a row that is named nowhere has the workload's template.

    Attributes:
        templates: by the orders of the parts, as in "2,0,1".
        template_digest: of the template as its file has it; names what is kept for it.
        has_kept: whether the database holds orders of earlier nights.
        chosen: rows for which this night has chosen: columns ``key_0``, ... and ``part_order``, null for that of the
            workload; they go before those of the database. None for no rows.
    """

    templates: Mapping[str, str]
    template_digest: str
    has_kept: bool
    chosen: pa.Table | None = None

    def prepare(self, connection: duckdb.DuckDBPyConnection, workload: "Workload") -> None:
        """Fill the temporary table that the statement ``read/row_layouts`` has made."""
        ways = [
            replace(workload, prompt=replace(workload.prompt, template=template), row_layouts=None)
            for template in self.templates.values()
        ]
        own = _list_fields(workload)
        parameters = {
            "orders": list(self.templates),
            "digests": [way.row_digest for way in ways],
            "places": [[own.index(name) + 1 for name in _list_fields(way)] for way in ways],
        }
        if self.has_kept:
            key = {"workload": workload.name, "template_digest": self.template_digest}
            connection.execute(statement("read/take_kept_layouts"), parameters | key)
        if self.chosen is not None:
            connection.register("batchloom_chosen_rows", self.chosen)
            connection.execute(statement("read/drop_chosen_layouts"))
            connection.execute(statement("read/take_chosen_layouts"), parameters)
            connection.unregister("batchloom_chosen_rows")


def _list_fields(workload: "Workload") -> list[str]:
    """In the order in which content keys hold them."""
    return [name for name in workload.columns if name in workload.prompt.fields]
