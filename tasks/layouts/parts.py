"""Splits a template into parts that may change places, and arranges them in another order.

A part begins with a paragraph that has a label, such as ``Document:``, ``# Document`` or ``<document>``, and ends at
the next such paragraph. Text before the first label and after the last field keeps its place, as do the separators
between parts.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations

from tasks.workloads.row_layouts import RowLayouts
from tasks.workloads.workload import Workload

MOST_PARTS = 5
"""Most parts of a template whose orders are compared; five parts have 120 orders."""

_LABEL = re.compile(r"#{1,6} *(\w[^\n{}]*)|<([A-Za-z][\w-]*)>|(\w[^\n{}:]{0,39}):(?=\s)")
_FIELD = re.compile(r"\{\{|\}\}|\{(\w+)\}")
_PARAGRAPH = re.compile(r"(?:\A|\n[ \t]*\n)\s*")

Order = tuple[int, ...]
"""Numbers of a template's parts, first to last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A split template: ``head + parts[0] + separators[0] + parts[1] + ... + tail`` is the template.

    Attributes:
        head: stays first.
        parts: may change places; empty if `fixed_because` is set.
        tail: stays last.
        fixed_because: why no parts may change places; empty if they may.
    """

    head: str
    labels: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    separators: tuple[str, ...] = ()
    tail: str = ""
    fixed_because: str = ""

    @property
    def written(self) -> Order:
        """The order as written in the file."""
        return tuple(range(len(self.parts)))

    @property
    def orders(self) -> tuple[Order, ...]:
        """All orders, the written one first."""
        return tuple(permutations(self.written))

    def arrange(self, order: Order) -> str:
        """The template with its parts in this order."""
        between = (*self.separators, "")
        arranged = [self.parts[number] + separator for number, separator in zip(order, between, strict=False)]
        return self.head + "".join(arranged) + self.tail

    def describe(self, order: Order) -> str:
        """The labels of the parts in this order."""
        return ", ".join(self.labels[number] for number in order)


def split_prompt(workload: Workload) -> Parts:
    """The parts of a workload's template; instructions that its kind of answer has put in front stay first."""
    template, instructions = workload.prompt.template, workload.kind.instructions
    escaped = instructions.replace("{", "{{").replace("}", "}}")
    has_them = instructions and not workload.prompt.chat and template.startswith(escaped)
    if workload.kind.is_pooled:
        return Parts(head=template, fixed_because="the model decides how its prompt is put together")
    return split_template(template, len(escaped) if has_them else 0)


def split_template(template: str, start: int = 0) -> Parts:
    """The parts of a template."""
    end = max(found.end() for found in _FIELD.finditer(template) if found.group(1))
    starts = [start + found.end() for found in _PARAGRAPH.finditer(template[start:end])]
    opened = [(place, label) for place in starts if (label := _LABEL.match(template, place, end)) is not None]
    labels = tuple(next(filter(None, label.groups())).strip() for _, label in opened)
    why = ""
    if len(labels) < 2:
        why = "fewer than two parts begin with a label, such as 'Document:' after a blank line"
    elif len({label.lower() for label in labels}) < len(labels):
        why = "a label occurs twice, as in solved examples"
    elif len(labels) > MOST_PARTS:
        why = f"there are {len(labels)} parts, more than {MOST_PARTS}"
    if why:
        return Parts(head=template, fixed_because=why)
    places = [place for place, _ in opened]
    raw = [template[first:last] for first, last in pairwise([*places, end])]
    parts = [text.rstrip() for text in raw[:-1]] + raw[-1:]
    return Parts(
        head=template[: places[0]],
        labels=labels,
        parts=tuple(parts),
        separators=tuple(text[len(part) :] for text, part in zip(raw[:-1], parts, strict=False)),
        tail=template[end:],
    )


def arrange_workload(workload: Workload, order: Sequence[int], row_layouts: RowLayouts | None = None) -> Workload:
    """The workload with its template's parts in this order, and ``layout = "written"``: nights do not arrange it again.

    Args:
        order: of its parts; empty for the written order.
        row_layouts: rows with other orders.
    """
    template = split_prompt(workload).arrange(tuple(order)) if order else workload.prompt.template
    prompt = replace(workload.prompt, template=template, layout="written")
    return replace(workload, prompt=prompt, row_layouts=row_layouts)


def name_order(order: Sequence[int]) -> str:
    """An order as text in the database and in artifacts, such as "2,0,1"."""
    return ",".join(map(str, order))
