"""A workload is data: which rows, which prompt, how to answer, where to. Read from TOML, checked once, then frozen."""

import hashlib
import json
import string
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from engine.errors import RequestError, WorkloadError
from engine.request import Mode, Request
from tasks.workloads.toml_table import TomlTable

ANSWER_COLUMNS = ("score", "label", "rank")
"""Columns of the output table of a scored workload."""

RESERVED_COLUMNS = frozenset(
    {
        *("row_id", "content_key", "error", "status", "finish_reason", "model", "run_id", "created_at"),
        *("num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "compute_ms", "prefix_group"),
        *("request_key", "is_sound", "row_priority"),
    }
)
"""Columns that batchloom itself writes; neither a key, a prompt field nor an answer may be called so."""

RESERVED_TABLES = frozenset(("documents", "queries", "snippet_requests", "ranking_candidates", "runs", "steps"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """How a row becomes a prompt.

    Attributes:
        system: the system message of the chat template; empty for none. Unused where chat is false.
        template: text with ``{field}`` for columns of the requests; ``{{`` and ``}}`` are braces. What many rows share
            comes first.
        chat: wrap it in the model's own chat template, else use it as plain text.
        may_be_empty: fields whose NULL or blank value is no error; they read as an empty string.
    """

    system: str
    template: str
    chat: bool
    may_be_empty: tuple[str, ...]

    @property
    def segments(self) -> tuple[tuple[str, str | None], ...]:
        """The template in reading order: a literal text, then the field that follows it (None where none does)."""
        return tuple((literal, field) for literal, field, _, _ in string.Formatter().parse(self.template))

    @property
    def fields(self) -> tuple[str, ...]:
        """The template's fields, each once, in reading order."""
        return tuple(dict.fromkeys(field for _, field in self.segments if field is not None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """How an answer is generated; names and ranges of `engine.Request`."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where answers go.

    Attributes:
        table: created when it is not there.
        answer_column: of a generated answer; empty in mode "score", whose columns are score, label and rank.
        rank_within: score only: the key column within which rows are ranked by score; empty for no rank.
    """

    table: str
    answer_column: str = ""
    rank_within: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One nightly job over a table.

    Attributes:
        name: unique among the workloads of a database; part of run ids.
        source: the shipped name or the TOML file's absolute path; `load_workload(source)` gives it again.
        mode: "generate" decodes text, "score" gives label probabilities.
        requests_sql: text of the query that selects the rows.
        key: columns that identify a row.
        priority: column of the query with a whole number; rows with a larger one are answered earlier, and a null is 0.
            Empty where all rows are alike.
        labels: score only: what the model chooses from; the score is the probability of the first.
    """

    name: str
    source: str
    mode: Mode
    requests_sql: str
    key: tuple[str, ...]
    prompt: Prompt
    decoding: Decoding
    labels: tuple[str, ...]
    output: Output
    priority: str = ""

    @property
    def digest(self) -> str:
        """sha256 over all that decides an answer apart from the row and the model: prompt, decoding, labels."""
        parts = [self.mode, asdict(self.prompt), asdict(self.decoding), self.labels]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @property
    def columns(self) -> tuple[str, ...]:
        """Key columns, then the template's fields that are not among them."""
        return tuple(dict.fromkeys(self.key + self.prompt.fields))


def load_workload(name_or_path: str | Path) -> Workload:
    """Read a shipped workload by name, or any TOML file by path (whatever ends in ``.toml`` or holds a ``/``).

    Raises:
        WorkloadError: no such workload, an unknown or missing key, a wrong type, a value out of range, a field that is
            no plain name, a column name that batchloom itself uses, or a requests_sql file that is not there.
    """
    shipped = Path(__file__).parents[2] / "workloads"
    is_path = isinstance(name_or_path, Path) or name_or_path.endswith(".toml") or "/" in name_or_path
    path = Path(name_or_path) if is_path else shipped / f"{name_or_path}.toml"
    try:
        text = path.read_text(encoding="utf-8")
        table = TomlTable(tomllib.loads(text), str(path))
    except FileNotFoundError as error:
        known = ", ".join(sorted(file.stem for file in shipped.glob("*.toml")))
        raise WorkloadError(f"no workload {str(name_or_path)!r}: no file {path}; shipped workloads: {known}") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise WorkloadError(f"{path} cannot be read as TOML: {error}") from error
    return _read_workload(table, path, str(path.absolute()) if is_path else str(name_or_path))


def _read_workload(table: TomlTable, path: Path, source: str) -> Workload:
    name = table.text("name")
    if not name.replace("_", "").replace("-", "").isalnum() or not name.isascii():
        table.refuse("name", f"must hold letters, digits, '-' and '_' only, got {name!r}")
    mode = table.text("mode")
    if mode not in ("generate", "score"):
        table.refuse("mode", f"must be 'generate' or 'score', got {mode!r}")
    requests_sql = _read_requests_sql(table, path)
    key = table.identifiers("key")
    priority = table.check_identifier("priority", table.text("priority", default=""))
    labels = table.texts("labels", optional=mode == "generate")
    prompt = _read_prompt(table.table("prompt"))
    decoding = _read_decoding(table.table("decoding", optional=True), name)
    output = _read_output(table.table("output"), mode, key)
    if mode == "generate" and labels:
        table.refuse("labels", "belong to mode 'score'")
    if mode == "score" and len(set(labels)) < max(2, len(labels)):
        table.refuse("labels", f"must hold two or more different strings, got {list(labels)!r}")
    if mode == "score" and decoding != Decoding():
        table.refuse("decoding", "belongs to mode 'generate'")
    table.refuse_rest()
    for column in (*key, *prompt.fields):
        if column.lower() in RESERVED_COLUMNS:
            table.refuse("key" if column in key else "prompt.template", f"may not use the column name {column!r}")
    if priority.lower() in RESERVED_COLUMNS:
        table.refuse("priority", f"may not use the column name {priority!r}")
    answers = (output.answer_column,) if mode == "generate" else ANSWER_COLUMNS
    written = [column.lower() for column in (*key, *answers)]
    if len(set(written)) < len(written):
        table.refuse("key", f"and the answer columns must all differ, got {written}")
    return Workload(
        name=name,
        source=source,
        mode="score" if mode == "score" else "generate",
        requests_sql=requests_sql,
        key=key,
        prompt=prompt,
        decoding=decoding,
        labels=labels,
        output=output,
        priority=priority,
    )


def _read_requests_sql(table: TomlTable, path: Path) -> str:
    name = table.text("requests_sql")
    if Path(name).name != name:
        table.refuse("requests_sql", f"must be a plain file name, got {name!r}")
    places = [path.parent / name, Path(__file__).parents[2] / "sql" / "requests" / name]
    found = [place for place in places if place.is_file()]
    if not found:
        table.refuse("requests_sql", f"names {name!r}, found neither as {places[0]} nor as {places[1]}")
    return found[0].read_text(encoding="utf-8")


def _read_prompt(table: TomlTable) -> Prompt:
    template = table.text("template")
    prompt = Prompt(
        system=table.text("system", default=""),
        template=template,
        chat=table.flag("chat", default=True),
        may_be_empty=table.texts("may_be_empty", optional=True),
    )
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        table.refuse("template", f"cannot be read: {error}")
    for _, field, spec, conversion in parsed:
        if field is not None and (not field.isidentifier() or spec or conversion):
            table.refuse("template", f"has a field {{{field}}} that is not a plain column name")
    if not prompt.fields:
        table.refuse("template", "must hold at least one {field}, else all prompts are the same")
    for field in prompt.may_be_empty:
        if field not in prompt.fields:
            table.refuse("may_be_empty", f"names {field!r}, which the template does not use")
    table.refuse_rest()
    return prompt


def _read_decoding(table: TomlTable, name: str) -> Decoding:
    default = Decoding()
    decoding = Decoding(
        max_new_tokens=table.whole("max_new_tokens", default.max_new_tokens),
        temperature=table.number("temperature", default.temperature),
        top_k=table.whole("top_k", default.top_k),
        top_p=table.number("top_p", default.top_p),
        seed=table.whole("seed", default.seed),
        stop=table.texts("stop", optional=True),
    )
    table.refuse_rest()
    try:
        Request(request_id=name, token_ids=np.zeros(1, np.int32), **asdict(decoding))
    except RequestError as error:
        raise WorkloadError(f"{table.where}: {error}") from error
    return decoding


def _read_output(table: TomlTable, mode: str, key: Sequence[str]) -> Output:
    is_score = mode == "score"
    output = Output(
        table=table.identifier("table"),
        answer_column="" if is_score else table.identifier("answer_column"),
        rank_within=table.text("rank_within", default="") if is_score else "",
    )
    table.refuse_rest()
    if output.table.lower() in RESERVED_TABLES:
        table.refuse("table", f"may not be {output.table!r}, a table of another use")
    if output.answer_column.lower() in RESERVED_COLUMNS:
        table.refuse("answer_column", f"may not be {output.answer_column!r}, a column that batchloom writes itself")
    if output.rank_within and output.rank_within not in key:
        table.refuse("rank_within", f"must be one of the key columns {list(key)}, got {output.rank_within!r}")
    return output
