"""The demo's database: topics of Python's language reference as documents, with questions and searches."""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import duckdb

from engine.errors import ConfigError, DatabaseError
from tasks.database.connection import connect, execute
from tasks.database.schema import create_schema

MIN_DOCUMENTS = 30
MIN_CANDIDATES = 10

MAX_BODY_CHARS = 1800
"""About 400 tokens: enough text for five questions, and short enough for a small model on two cores."""

_APPARATUS = (
    re.compile(r"^[^\n]+\n[=*~^\"'+#-]+$"),  # a heading
    re.compile(r"^[=*-]+$"),  # a rule
    re.compile(r"^(New|Added|Changed|Deprecated) (in|since) version"),
)
"""Patterns of paragraphs that are left out."""
_FOOTNOTE_MARK = re.compile(r"\s\[\d+\]")
_BROKEN_HYPHEN = re.compile(r"(?<=\w-)\n(?=\w)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceTopic:
    """One document of the demo: `name` is its id, `body` consists of complete paragraphs."""

    name: str
    title: str
    body: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoContents:
    """The rows of the demo's database.

    Attributes:
        questions, kinds: document name to its questions, and to its kind where Python itself proves it.
        searches: text of a search to its candidates' names, in alphabetical order.
        missing: topics that this Python's reference lacks; they are left out of the other attributes.
    """

    documents: Mapping[str, ReferenceTopic]
    questions: Mapping[str, tuple[str, ...]]
    searches: Mapping[str, tuple[str, ...]]
    kinds: Mapping[str, str]
    missing: tuple[str, ...]


def read_demo_contents() -> DemoContents:
    """Read questions.toml, rankings.toml and gold.toml, and the documents they name from this Python's reference.
    Raises `ConfigError` if that has fewer than `MIN_DOCUMENTS` of the topics."""
    folder = Path(__file__).parents[2] / "demo"
    questions, rankings, gold = (
        tomllib.loads((folder / f"{name}.toml").read_text(encoding="utf-8"))
        for name in ("questions", "rankings", "gold")
    )
    found = {name: read_reference_topic(name) for name in questions}
    documents = {name: topic for name, topic in found.items() if topic is not None}
    if len(documents) < MIN_DOCUMENTS:
        raise ConfigError(
            f"this Python's reference (pydoc_data.topics) has {len(documents)} of the demo's {len(questions)} topics, "
            f"at least {MIN_DOCUMENTS} are needed"
        )
    searches = {
        search["text"]: tuple(sorted(name for name in search["relevant"] + search["others"] if name in documents))
        for search in rankings["search"]
    }
    return DemoContents(
        documents=documents,
        questions={name: tuple(questions[name]) for name in documents},
        searches={text: names for text, names in searches.items() if len(names) >= MIN_CANDIDATES},
        kinds={name: proved["kind"] for name, proved in gold.items() if name in documents},
        missing=tuple(name for name in questions if name not in documents),
    )


def build_demo_database(path: Path, contents: DemoContents) -> None:
    """Create the database at `path`, with the demo's inputs and empty output tables, completely or not at all. Raises
    `DatabaseError` if it cannot be written."""
    if not path.parent.is_dir():
        raise DatabaseError(f"{path} cannot be written: no folder {path.parent}")
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.unlink(missing_ok=True)
    try:
        with connect(scratch, create=True) as connection:
            create_schema(connection)
            _insert(connection, contents)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def add_gold_rows(connection: duckdb.DuckDBPyConnection, contents: DemoContents) -> None:
    """Create or replace the tables with which answers of facts.toml and facets.toml are compared. A document shows code
    where a paragraph of it is indented, as the reference writes literal blocks."""
    bodies = {name: contents.documents[name].body for name in contents.kinds}
    columns = {
        "doc_ids": list(bodies),
        "kinds": list(contents.kinds.values()),
        "have_code": ["\n\n " in f"\n\n{body}" for body in bodies.values()],
    }
    execute(connection, "demo/gold_facts", columns)
    execute(connection, "demo/gold_facets")


def _insert(connection: duckdb.DuckDBPyConnection, contents: DemoContents) -> None:
    asked = [
        (name, f"{name}-{number}", text)
        for name, questions in contents.questions.items()
        for number, text in enumerate(questions, start=1)
    ]
    searches = [(f"search-{number:02d}", text) for number, text in enumerate(contents.searches, start=1)]
    queries = [*((query_id, text) for _, query_id, text in asked), *searches]
    candidates = [(query_id, name) for query_id, text in searches for name in contents.searches[text]]
    tables = {
        "documents": [{"doc_id": t.name, "title": t.title, "body": t.body} for t in contents.documents.values()],
        "queries": [{"query_id": query_id, "query_text": text} for query_id, text in queries],
        "snippet_requests": [{"doc_id": name, "query_id": query_id} for name, query_id, _ in asked],
        "ranking_candidates": [{"query_id": query_id, "doc_id": name} for query_id, name in candidates],
    }
    for table, rows in tables.items():
        execute(connection, "write/insert_rows", {"rows": rows}, table=table)


def read_reference_topic(name: str) -> ReferenceTopic | None:
    """The topic of this name, or None if this Python's reference lacks it. Its body is the first paragraph, and further
    ones up to `MAX_BODY_CHARS` characters in all. Lines of prose are joined; headings, grammars, version notes,
    footnotes and references are left out."""
    if name not in topics:
        return None
    text, _, _ = topics[name].partition("-[ Footnotes ]-")
    title, _, rest = text.strip().partition("\n")
    return ReferenceTopic(name=name, title=title.strip(), body=_trim(rest.partition("\n")[2]))


def _trim(text: str) -> str:
    kept: list[str] = []
    num_chars = 0
    is_reference = False
    for paragraph in re.split(r"\n[ \t]*\n", text.strip("\n")):
        paragraph = _FOOTNOTE_MARK.sub("", paragraph).strip("\n").rstrip()
        is_indented = paragraph.startswith(" ")
        is_reference = paragraph == "See also:" or (is_reference and is_indented)
        if "::=" in paragraph:
            if kept and kept[-1].endswith(":"):
                kept[-1] = kept[-1][:-1] + "."
            continue
        if not paragraph or is_reference or any(pattern.match(paragraph.strip()) for pattern in _APPARATUS):
            continue
        if not is_indented:
            paragraph = " ".join(_BROKEN_HYPHEN.sub("", paragraph).split())
        if kept and num_chars + len("\n\n") + len(paragraph) > MAX_BODY_CHARS:
            break
        num_chars += len(paragraph) + (len("\n\n") if kept else 0)
        kept.append(paragraph)
    while len(kept) > 1 and kept[-1].endswith(":"):  # it announces a paragraph that was left out
        kept.pop()
    return "\n\n".join(kept)
