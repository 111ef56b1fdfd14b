"""Writes results into docs/papers.md: each table between its two markers, plots as SVG files in charts/."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.measuring.charts import FOLDER, bar_chart, line_chart, save_chart
from benchmarks.measuring.generated_part import replace_generated


def render_page(results: Mapping[str, Any], document: Path) -> None:
    """Replace the text between the markers of each table, and the plots.

    Raises:
        ValueError: a table's markers are missing.
    """
    text = document.read_text()
    for name, found in results["tables"].items():
        text = replace_generated(text, name, _lines(name, found))
        for plot in found["table"]["plots"]:
            save_chart(_draw(plot), document, _file(name, plot))
    document.write_text(text)


def _lines(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    table, machine = found["table"], found["machine"]
    yield ""
    yield f"`{found['command']}`"
    yield ""
    place = "" if table["method"].startswith("simulated") else (
        f"; {machine['num_cores']} cores of {machine['cpu']}, load of others before {machine['load_average_before']}"
    )  # fmt: skip
    method = table["method"]
    yield f"{method[0].upper()}{method[1:]}{place}; commit {machine['commit']}."
    yield ""
    yield f"| {' | '.join(table['columns'])} |"
    yield "|---" * len(table["columns"]) + "|"
    for row in table["rows"]:
        yield f"| {' | '.join(_cell(cell) for cell in row)} |"
    for plot in table["plots"]:
        yield ""
        yield f"![{plot['title']}]({FOLDER}/{_file(name, plot)})"
    yield ""


def _cell(cell: str | float) -> str:
    return cell if isinstance(cell, str) else f"{cell:,}"


def _file(name: str, plot: Mapping[str, Any]) -> str:
    return f"papers_{name}_{plot['slug']}.svg".replace("-", "_")


def _draw(plot: Mapping[str, Any]) -> str:
    if plot["kind"] == "bars":
        return bar_chart(plot["title"], plot["series"], plot["labels"][0])
    return line_chart(plot["title"], plot["series"], *plot["labels"])
