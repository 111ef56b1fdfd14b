"""The layouts that nights have chosen, in the database beside the answers that were made with them."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sql import statement
from tasks.database.connection import connect
from tasks.database.schema import list_relations
from tasks.layouts.parts import Order, arrange_workload, split_prompt
from tasks.workloads.workload import Workload

TABLE = "workload_layouts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A layout that a night has chosen.

    Attributes:
        workload: as its file has it.
        order: of its template's parts.
        num_tokens: that the plan of the night computes with it, of all workloads that are planned together.
        num_written_tokens: the same with the layouts as they are written.
    """

    workload: Workload
    order: Order
    num_tokens: int
    num_written_tokens: int


def read_order(database: str | Path, workload: Workload) -> Order | None:
    """The order that is kept for the workload's template; None where no night has chosen one."""
    with connect(database, read_only=True) as connection:
        if TABLE not in list_relations(connection):
            return None
        key = {"workload": workload.name, "template_digest": _digest(workload)}
        found = connection.execute(statement("layouts/read_layout"), key).fetchall()
    order = tuple(found[0][0]) if found else ()
    return order if sorted(order) == list(split_prompt(workload).written) and found else None


def use_kept(database: str | Path, workload: Workload) -> Workload:
    """The workload as its newest answers were asked for: in the layout that is kept, else as it is written."""
    if workload.prompt.layout == "written":
        return workload
    return arrange_workload(workload, read_order(database, workload) or ())


def keep_choices(database: str | Path, choices: Sequence[Choice]) -> None:
    """Replace what is kept for these workloads, all or nothing.

    Raises:
        DatabaseError: the database is locked or cannot be written.
    """
    with connect(database) as connection:
        connection.begin()
        try:
            connection.execute(statement("layouts/create_layouts"))
            for choice in choices:
                key = {"workload": choice.workload.name, "template_digest": _digest(choice.workload)}
                connection.execute(statement("layouts/delete_layout"), {"workload": choice.workload.name})
                row = {
                    "part_order": list(choice.order),
                    "template": arrange_workload(choice.workload, choice.order).prompt.template,
                    "num_computed_tokens": choice.num_tokens,
                    "num_written_tokens": choice.num_written_tokens,
                }
                connection.execute(statement("layouts/insert_layout"), key | row)
            connection.commit()
        except BaseException:
            connection.rollback()
            raise


def _digest(workload: Workload) -> str:
    """Of the template as written: another template has layouts of its own."""
    prompt = workload.prompt
    return hashlib.sha256(json.dumps([prompt.system, prompt.chat, prompt.template]).encode()).hexdigest()
