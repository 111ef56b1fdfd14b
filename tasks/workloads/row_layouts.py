"""Rows whose prompts have their parts in another order than the workload's template."""

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
    """The orders that rows may have, and the rows that have one; all other rows have the workload's own order.

    Attributes:
        templates: order of the parts, as in "2,0,1", to the template in this order.
        template_digest, has_kept: of the template in its file, and whether the database holds orders of rows for it.
        chosen: orders that this night has chosen, which override those: columns ``key_0``, ... and ``part_order``, null
            for the workload's order.
    """

    templates: Mapping[str, str]
    template_digest: str
    has_kept: bool
    chosen: pa.Table | None = None

    def prepare(self, connection: duckdb.DuckDBPyConnection, workload: "Workload") -> None:
        """Fill the temporary table that the statement ``read/row_layouts`` makes."""
        ways = [
            replace(workload, prompt=replace(workload.prompt, template=template), row_layouts=None)
            for template in self.templates.values()
        ]
        own = workload.hashed_fields
        parameters = {
            "orders": list(self.templates),
            "digests": [way.row_digest for way in ways],
            "places": [[own.index(name) + 1 for name in way.hashed_fields] for way in ways],
        }
        if self.has_kept:
            key = {"workload": workload.name, "template_digest": self.template_digest}
            connection.execute(statement("read/take_kept_layouts"), parameters | key)
        if self.chosen is not None:
            connection.register("batchloom_chosen_rows", self.chosen)
            connection.execute(statement("read/drop_chosen_layouts"))
            connection.execute(statement("read/take_chosen_layouts"), parameters)
            connection.unregister("batchloom_chosen_rows")
