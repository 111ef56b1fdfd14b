"""The table of one experiment: its method, rows and plots."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Cell = str | float | int


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The result of one experiment, of JSON types.

    Attributes:
        method: "simulated" with the device, or "measured" with the model; and the workload, in words.
        columns: headings, with units.
        rows: one configuration each, its cells in the order of the columns.
        plots: shown with the table.
    """

    method: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    plots: Sequence["Plot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One plot.

    Attributes:
        slug: last part of the file name.
        kind: "bars": series are groups of bars, name to value. "lines": series are lines, (x, y) each.
        labels: of bars, their unit; of lines, x and y.
    """

    slug: str
    title: str
    kind: str
    labels: Sequence[str]
    series: Mapping[str, Any]
