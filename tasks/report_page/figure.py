"""A picture with its title, what to look for, its legend, its table, and the SQL that its numbers come from."""

from collections.abc import Sequence
from dataclasses import dataclass

from sql import statement
from tasks.report_page.markup import Markup, element
from tasks.report_page.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One part of the page.

    Attributes:
        slug: its name in links; what `Chart` has, too.
        title: in a few words.
        note: how to read it.
        table: its numbers.
        statement: name of the file in ``sql/`` without its ending.
        chart: the picture; None where the table says it all and is shown at once.
        legend: (class of the marks, what they are).
        is_wide: takes the whole width of the page.
    """

    slug: str
    title: str
    note: str
    table: Table
    statement: str
    chart: Markup | None = None
    legend: Sequence[tuple[str, str]] = ()
    is_wide: bool = True

    def render(self) -> Markup:
        if self.chart is None:
            content = [self.table.render()]
        else:
            keys = [element("li", element("span", class_=f"key {kind}"), text) for kind, text in self.legend]
            content = [
                *([element("ul", *keys, class_="legend")] if keys else []),
                element("div", self.chart, class_="chart"),
                element("details", element("summary", "Table"), self.table.render()),
            ]
        sql = element("pre", element("code", statement(self.statement)), tabindex=0)
        return element(
            "figure",
            element("h3", self.title, id=f"{self.slug}-title"),
            element("p", self.note, id=f"{self.slug}-note", class_="note"),
            *content,
            element("details", element("summary", f"SQL: sql/{self.statement}.sql"), sql),
            id=self.slug,
            class_="wide" if self.is_wide else None,
        )
