"""A table of one experiment: what its rows are, how they were come by, and the plot beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Cell = str | float | int


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One experiment's result; JSON as it stands.

    Attributes:
        method: "simulated" with the device, or "measured" with the model; and the workload, in words.
        columns: headings, with units.
        rows: one configuration each, its cells in the order of the columns.
        plots: drawn beside it.
    """

    method: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    plots: Sequence["Plot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """What a picture shows.

    Attributes:
        slug: ends the file's name.
        kind: "bars": series are groups of bars, name to value. "lines": series are lines, (x, y) each.
        labels: of bars, their unit; of lines, x and y.
    """

    slug: str
    title: str
    kind: str
    labels: Sequence[str]
    series: Mapping[str, Any]
