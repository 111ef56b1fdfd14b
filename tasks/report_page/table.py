"""The table beside a picture: the same numbers for those who read, hear or copy them."""

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.report_page.markup import Markup, element, join


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells as text.

    Attributes:
        caption: what it holds.
        columns: their titles.
        rows: a cell a column.
        num_text_columns: so many on the left are text, the others are numbers and stand to the right.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_text_columns: int = 1

    def render(self) -> Markup:
        def cell(tag: str, column: int, text: str, scope: str | None = None) -> Markup:
            return element(tag, text, scope=scope, class_="text" if column < self.num_text_columns else None)

        head = [cell("th", column, title, "col") for column, title in enumerate(self.columns)]
        body = [
            element(
                "tr",
                *(
                    cell("td" if column else "th", column, text, None if column else "row")
                    for column, text in enumerate(row)
                ),
            )
            for row in self.rows
        ]
        return element(
            "div",
            element(
                "table",
                element("caption", self.caption),
                element("thead", element("tr", *head)),
                element("tbody", join(body)),
            ),
            class_="scroll",
            tabindex=0,
            role="region",
            aria_label=self.caption,
        )
