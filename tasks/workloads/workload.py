"""A workload is data: which rows, which prompt, how to answer, where to. Read from TOML, checked once, then frozen."""

import hashlib
import json
import re
import string
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import pydantic
from pydantic import AfterValidator, Field, StrictBool, StrictFloat, StrictInt, ValidationInfo
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails

from engine.errors import WorkloadError
from engine.request import Mode, Request

SHIPPED = Path(__file__).parents[2] / "workloads"

ANSWER_COLUMNS = ("score", "label", "rank")
"""Columns of the output table of a scored workload."""

RESERVED_COLUMNS = (
    *("row_id", "content_key", "error", "status", "finish_reason", "model", "run_id", "created_at"),
    *("num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "compute_ms", "prefix_group"),
    *("request_key", "is_sound", "row_priority"),
)
"""Columns that batchloom writes: not for keys, prompt fields, priorities or answers."""

RESERVED_TABLES = frozenset(("documents", "queries", "snippet_requests", "ranking_candidates", "runs", "steps"))

_CONFIG = pydantic.ConfigDict(extra="forbid")
_PLAIN = re.compile("[A-Za-z0-9_-]*[A-Za-z0-9][A-Za-z0-9_-]*")


def _refuse_if(is_wrong: object, why: str) -> None:
    if is_wrong:
        raise ValueError(why)


def _must(test: Callable[[Any], object], why: str) -> AfterValidator:
    """Refuse what fails the test; `why` goes on from the value's key, ``{!r}`` in it is the value."""

    def check(value: Any) -> Any:
        _refuse_if(not test(value), why.format(list(value) if isinstance(value, tuple) else value))
        return value

    return AfterValidator(check)


def _read_requests_sql(name: str, info: ValidationInfo) -> str:
    if info.context is None:  # a copy of a workload, which has the text already
        return name
    _refuse_if(Path(name).name != name, f"must be a plain file name, got {name!r}")
    places = [Path(str(folder)) / name for folder in (info.context, Path(__file__).parents[2] / "sql" / "requests")]
    found = [place for place in places if place.is_file()]
    _refuse_if(not found, f"names {name!r}, found neither as {places[0]} nor as {places[1]}")
    return found[0].read_text(encoding="utf-8")


_NOT_PRINTABLE = "must be a printable name of at most 128 characters, got {!r}"
_Name = Annotated[str, _must(lambda name: name.isprintable() and len(name) <= 128, _NOT_PRINTABLE)]
_Text = Annotated[str, _must(str.strip, "must not be empty")]
_Texts = tuple[Annotated[str, Field(min_length=1)], ...]


@dataclass(frozen=True, slots=True, kw_only=True, config=_CONFIG)
class Prompt:
    """How a row becomes a prompt.

    Attributes:
        template: text with ``{field}`` for columns of the requests; ``{{`` and ``}}`` are braces.
        system: message of the chat template; empty for none, unused if chat is false.
        chat: wrap it in the model's own chat template, else use it as plain text.
        may_be_empty: fields whose NULL or blank value is no error but an empty string.
    """

    template: _Text
    system: str = ""
    chat: StrictBool = True
    may_be_empty: _Texts = ()

    @property
    def segments(self) -> tuple[tuple[str, str | None], ...]:
        """The template in reading order: a literal text, then the field that follows it (None where none does)."""
        return tuple((literal, field) for literal, field, _, _ in string.Formatter().parse(self.template))

    @property
    def fields(self) -> tuple[str, ...]:
        """The template's fields, each once, in reading order."""
        return tuple(dict.fromkeys(field for _, field in self.segments if field is not None))

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        try:
            parsed = list(string.Formatter().parse(self.template))
        except ValueError as error:
            raise ValueError(f"template cannot be read: {error}") from error
        for _, field, spec, conversion in parsed:
            is_column = field is None or (field.isidentifier() and not spec and not conversion)
            _refuse_if(not is_column, f"template has a field {{{field}}} that is not a plain column name")
        _refuse_if(not self.fields, "template must hold at least one {field}, else all prompts are the same")
        for field in self.may_be_empty:
            _refuse_if(field not in self.fields, f"may_be_empty names {field!r}, which the template does not use")
        return self


@dataclass(frozen=True, slots=True, kw_only=True, config=_CONFIG)
class Decoding:
    """How an answer is generated; names and ranges of `engine.Request`."""

    max_new_tokens: StrictInt = 64
    temperature: StrictFloat = 0.0
    top_k: StrictInt = 0
    top_p: StrictFloat = 1.0
    seed: StrictInt = 0
    stop: _Texts = ()

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        Request(request_id="every row", token_ids=np.zeros(1, np.int32), **asdict(self))
        return self


@dataclass(frozen=True, slots=True, kw_only=True, config=_CONFIG)
class Output:
    """Where answers go.

    Attributes:
        table: created if it does not exist.
        answer_column: of a generated answer; empty in mode "score", whose columns are `ANSWER_COLUMNS`.
        rank_within: score only: the key column within which rows are ranked; empty for no rank.
    """

    table: Annotated[
        _Name,
        _must(str.strip, "must not be empty"),
        _must(lambda name: name.lower() not in RESERVED_TABLES, "may not be {!r}, a table of another use"),
    ]
    answer_column: Annotated[
        _Name,
        _must(
            lambda name: name.lower() not in RESERVED_COLUMNS, "may not be {!r}, a column that batchloom writes itself"
        ),
    ] = ""
    rank_within: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, config=_CONFIG)
class Workload:
    """One nightly job over a table.

    Attributes:
        name: unique among the workloads of a database; part of run ids.
        source: the shipped name or the TOML file's absolute path; `load_workload(source)` gives it again.
        mode: "generate" decodes text, "score" gives label probabilities.
        requests_sql: text of the query that selects the rows.
        key: columns that identify a row.
        labels: score only: what the model chooses from; the score is the probability of the first.
        priority: whole-number column of the query; larger ones are answered earlier, null is 0. Empty for none.
    """

    name: Annotated[_Text, _must(_PLAIN.fullmatch, "must hold letters, digits, '-' and '_' only, got {!r}")]
    source: str
    mode: Mode
    requests_sql: Annotated[_Text, AfterValidator(_read_requests_sql)]
    key: Annotated[
        tuple[Annotated[_Name, Field(min_length=1)], ...],
        _must(
            lambda names: 0 < len({name.lower() for name in names}) == len(names),
            "must name one or more different columns, got {!r}",
        ),
    ]
    prompt: Prompt
    decoding: Decoding = Decoding()
    labels: _Texts = ()
    output: Output
    priority: _Name = ""

    @property
    def digest(self) -> str:
        """sha256 over all that decides an answer apart from the row and the model: prompt, decoding, labels."""
        parts = [self.mode, asdict(self.prompt), asdict(self.decoding), self.labels]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @property
    def answer_columns(self) -> tuple[str, ...]:
        """Columns of the output table that hold the answer."""
        return (self.output.answer_column,) if self.mode == "generate" else ANSWER_COLUMNS

    @property
    def max_answer_tokens(self) -> int:
        """Most tokens of an answer; 1 in mode "score", where a prompt's last row gives the score."""
        return self.decoding.max_new_tokens if self.mode == "generate" else 1

    @property
    def columns(self) -> tuple[str, ...]:
        """Key columns, then the template's fields that are not among them."""
        return tuple(dict.fromkeys(self.key + self.prompt.fields))


_EXPECTED = {
    "string_type": "a string",
    "tuple_type": "a list of strings",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "dataclass_type": "a table",
}
_MISSING = {"key": "a list of strings", "prompt": "a table", "output": "a table"}


_WORKLOAD = pydantic.TypeAdapter(Workload)


def load_workload(name_or_path: str | Path) -> Workload:
    """Read a shipped workload by name, or any TOML file by path (whatever ends in ``.toml`` or holds a ``/``).

    Raises:
        WorkloadError: no such workload, or a key or value of the file is missing, unknown or wrong.
    """
    is_path = isinstance(name_or_path, Path) or name_or_path.endswith(".toml") or "/" in name_or_path
    path = Path(name_or_path) if is_path else SHIPPED / f"{name_or_path}.toml"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        known = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.toml")))
        raise WorkloadError(f"no workload {str(name_or_path)!r}: no file {path}; shipped workloads: {known}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path} cannot be read: {error}") from error
    try:
        values = tomllib.loads(text)
        _refuse_if("source" in values, "'source' is not a known key here")
        source = str(path.absolute()) if is_path else str(name_or_path)
        workload = _WORKLOAD.validate_python(values | {"source": source}, context=path.parent)
        _check_mode(workload, values)
    except tomllib.TOMLDecodeError as error:
        raise WorkloadError(f"{path} cannot be read as TOML: {error}") from error
    except pydantic.ValidationError as error:
        raise WorkloadError(f"{path}: {_describe_fault(error.errors()[0], values)}") from error
    except ValueError as error:
        raise WorkloadError(f"{path}: {error}") from error
    return workload


def _check_mode(workload: Workload, values: Mapping[str, Any]) -> None:
    """Refuse what the workload's mode does not allow, or lacks; `values` are the file's."""
    key, output, labels = list(workload.key), workload.output, list(workload.labels)
    own, foreign = ("answer_column", "rank_within") if workload.mode == "generate" else ("labels", "answer_column")
    _refuse_if(foreign in values["output"], f"[output]: {foreign!r} is not a known key here")
    if workload.mode == "generate":
        _refuse_if(own not in values["output"], f"[output]: {own} is missing; expected a string")
        _refuse_if(not output.answer_column.strip(), f"[output]: {own} must not be empty")
        _refuse_if(labels, "labels belong to mode 'score'")
    else:
        _refuse_if(own not in values, f"{own} is missing; expected a list of strings")
        is_choice = 1 < len(set(labels)) == len(labels)
        _refuse_if(not is_choice, f"labels must hold two or more different strings, got {labels}")
        _refuse_if(workload.decoding != Decoding(), "decoding belongs to mode 'generate'")
        is_known = output.rank_within in ("", *key)
        _refuse_if(
            not is_known, f"[output]: rank_within must be one of the key columns {key}, got {output.rank_within!r}"
        )
    used = {"key": key, "prompt.template": workload.prompt.fields, "priority": (workload.priority,)}
    for place, columns in used.items():
        for column in columns:
            _refuse_if(column.lower() in RESERVED_COLUMNS, f"{place} may not use the column name {column!r}")
    written = [column.lower() for column in (*key, *workload.answer_columns)]
    _refuse_if(len(set(written)) < len(written), f"key and the answer columns must all differ, got {written}")


def _describe_fault(fault: ErrorDetails, values: Mapping[str, Any]) -> str:
    """A fault in a line: table, key, what was expected, what was found."""
    kind, context = fault["type"], fault.get("ctx", {})
    steps = [str(step) for step in fault["loc"] if isinstance(step, str)]
    if kind == "value_error" and isinstance(fault["input"], dict):  # a whole table is wrong
        return "".join(f"[{table}]: " for table in steps) + str(context["error"])
    *tables, key = steps
    for table in tables:
        values = values[table]
    where = "".join(f"[{table}]: " for table in tables)
    if kind == "missing":
        return f"{where}{key} is missing; expected {_MISSING.get(key, 'a string')}"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{where}{key!r} is not a known key here"
    if kind == "value_error":
        return f"{where}{key} {context['error']}"
    if kind == "literal_error":
        expected = context["expected"]
    else:
        is_item = isinstance(fault["loc"][-1], int)
        expected = "a list of non-empty strings" if is_item else _EXPECTED[kind]
    return f"{where}{key} must be {expected}, got {values[key]!r}"
