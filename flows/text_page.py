"""A page of text, for a terminal and for an artifact of its flow run."""

import io
import re
import shutil
from collections.abc import Iterable
from typing import IO

from prefect.artifacts import create_markdown_artifact
from rich import box
from rich.console import Console
from rich.table import Table

from tasks.runs.run_summary import artifact_key

ARTIFACT_COLUMNS = 140

_CONTROLS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters of rows that would move the cursor, change the terminal or the direction of text; they have no width."""


def make_console(width: int | None = None, file: IO[str] | None = None) -> Console:
    """A console that prints text as it is: brackets are no markup, ``:name:`` is no emoji, numbers have no colour."""
    is_terminal = None if file is None else False
    return Console(width=width, file=file, force_terminal=is_terminal, markup=False, emoji=False, highlight=False)


class TextPage:
    """A page without colours that `console` prints to, of so many columns; 0 is the terminal's width."""

    def __init__(self, columns: int = 0) -> None:
        self._file = io.StringIO()
        width = columns or shutil.get_terminal_size((120, 0)).columns
        self.console = make_console(width, self._file)

    @property
    def text(self) -> str:
        """The page without trailing spaces and control characters."""
        return "\n".join(line.rstrip() for line in _CONTROLS.sub("", self._file.getvalue()).rstrip().splitlines())


def make_table(title: str, texts: Iterable[str], numbers: Iterable[str] = (), *, show_lines: bool = False) -> Table:
    """A table without rows; its columns of texts come first.

    Args:
        title: empty for none.
        show_lines: between rows.
    """
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, show_lines=show_lines)
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def publish_page(kind: str, workload: str, text: str, description: str) -> None:
    """Store a page as the artifact ``<kind>-<workload>`` of the calling flow run.

    Args:
        kind: of page, such as "forecast".
        description: one line.
    """
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))  # longer than any in the text
    markdown = f"{fence}\n{text}\n{fence}"
    create_markdown_artifact(markdown=markdown, key=artifact_key(kind, workload), description=description)


def escape_controls(text: str) -> str:
    """The text with what is not printed, other than spaces, tabs and ends of lines, as Python's escapes: a row may hold
    what a terminal obeys."""
    hidden = {char for char in text if not (char.isprintable() or char in "\n\t")}
    return text.translate({ord(char): char.encode("unicode_escape").decode() for char in hidden})


def show_duration(seconds: float) -> str:
    """In seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def show_size(num_bytes: float) -> str:
    """In MB or GB."""
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.2f} MB"
