"""A page of text, for a terminal and for an artifact of its flow run."""

import io
import shutil

from prefect.artifacts import create_markdown_artifact
from rich.console import Console

from tasks.runs.run_summary import artifact_key


class TextPage:
    """A page without colours that `console` prints to.

    Args:
        columns: width; 0 is the terminal's.
    """

    def __init__(self, columns: int = 0) -> None:
        self._file = io.StringIO()
        width = columns or shutil.get_terminal_size((120, 0)).columns
        self.console = Console(width=width, file=self._file, color_system=None)

    @property
    def text(self) -> str:
        """The page without trailing spaces."""
        return "\n".join(line.rstrip() for line in self._file.getvalue().rstrip().splitlines())


def publish_page(kind: str, workload: str, text: str, description: str) -> None:
    """Store a page as the artifact ``<kind>-<workload>`` of the calling flow run.

    Args:
        kind: of page, such as "forecast".
        workload: its name.
        text: of the page.
        description: one line.
    """
    create_markdown_artifact(markdown=f"```\n{text}\n```", key=artifact_key(kind, workload), description=description)


def show_duration(seconds: float) -> str:
    """In seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def show_size(num_bytes: float) -> str:
    """In MB or GB."""
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.2f} MB"
