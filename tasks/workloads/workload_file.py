"""A workload's TOML file: the tables of each mode, and every fault told with its place."""

import re
import string
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import pydantic
from pydantic import AfterValidator, BaseModel, Field, StrictBool, StrictFloat, StrictInt, ValidationInfo
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails

from engine.errors import WorkloadError
from engine.request import Request

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

_CONFIG = pydantic.ConfigDict(extra="forbid")


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
    places = [Path(str(folder)) / name for folder in (info.context, Path(__file__).parents[2] / "sql" / "requests")]
    found = [place for place in places if place.is_file()]
    _refuse_if(not found, f"names {name!r}, found neither as {places[0]} nor as {places[1]}")
    return found[0].read_text(encoding="utf-8")


_IS_NAME = _must(
    lambda name: name.isprintable() and len(name) <= 128, "must be a printable name of at most 128 characters, got {!r}"
)
_Text = Annotated[str, _must(str.strip, "must not be empty")]
_Identifier = Annotated[_Text, _IS_NAME]
_Texts = tuple[Annotated[str, Field(min_length=1)], ...]


@dataclass(frozen=True, slots=True, kw_only=True, config=_CONFIG)
class Prompt:
    """How a row becomes a prompt.

    Attributes:
        template: text with ``{field}`` for columns of the requests; ``{{`` and ``}}`` are braces. What many rows share
            comes first.
        system: the system message of the chat template; empty for none. Unused where chat is false.
        chat: wrap it in the model's own chat template, else use it as plain text.
        may_be_empty: fields whose NULL or blank value is no error; they read as an empty string.
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


class _Table(BaseModel):
    model_config = _CONFIG


class _Output(_Table):
    table: Annotated[
        _Identifier, _must(lambda name: name.lower() not in RESERVED_TABLES, "may not be {!r}, a table of another use")
    ]


class _GenerateOutput(_Output):
    answer_column: Annotated[
        _Identifier,
        _must(
            lambda name: name.lower() not in RESERVED_COLUMNS, "may not be {!r}, a column that batchloom writes itself"
        ),
    ]


class _ScoreOutput(_Output):
    rank_within: str = ""


class WorkloadFile(_Table):
    """What the files of all modes have in common; a mode adds keys, and says which columns its answers have."""

    name: Annotated[
        _Text,
        _must(
            re.compile("[A-Za-z0-9_-]*[A-Za-z0-9][A-Za-z0-9_-]*").fullmatch,
            "must hold letters, digits, '-' and '_' only, got {!r}",
        ),
    ]
    requests_sql: Annotated[
        _Text,
        _must(lambda name: Path(name).name == name, "must be a plain file name, got {!r}"),
        AfterValidator(_read_requests_sql),
    ]
    key: Annotated[
        tuple[Annotated[str, Field(min_length=1), _IS_NAME], ...],
        _must(
            lambda names: 0 < len({name.lower() for name in names}) == len(names),
            "must name one or more different columns, got {!r}",
        ),
    ]
    priority: Annotated[str, _IS_NAME] = ""
    labels: _Texts = ()
    prompt: Prompt
    decoding: Decoding = Decoding()
    output: _Output

    def _check_columns(self, answers: tuple[str, ...]) -> None:
        used = {"key": self.key, "prompt.template": self.prompt.fields, "priority": (self.priority,)}
        for key, columns in used.items():
            for column in columns:
                _refuse_if(column.lower() in RESERVED_COLUMNS, f"{key} may not use the column name {column!r}")
        written = [column.lower() for column in (*self.key, *answers)]
        _refuse_if(len(set(written)) < len(written), f"key and the answer columns must all differ, got {written}")


class _GenerateFile(WorkloadFile):
    mode: Literal["generate"]
    output: _GenerateOutput

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        _refuse_if(self.labels, "labels belong to mode 'score'")
        self._check_columns((self.output.answer_column,))
        return self


class _ScoreFile(WorkloadFile):
    mode: Literal["score"]
    labels: Annotated[
        _Texts,
        _must(lambda labels: 1 < len(set(labels)) == len(labels), "must hold two or more different strings, got {!r}"),
    ]
    output: _ScoreOutput

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        _refuse_if(self.decoding != Decoding(), "decoding belongs to mode 'generate'")
        within, key = self.output.rank_within, list(self.key)
        is_known = not within or within in key
        _refuse_if(not is_known, f"[output]: rank_within must be one of the key columns {key}, got {within!r}")
        self._check_columns(ANSWER_COLUMNS)
        return self


_FILE: pydantic.TypeAdapter[WorkloadFile] = pydantic.TypeAdapter(
    Annotated[_GenerateFile | _ScoreFile, Field(discriminator="mode")]
)
_EXPECTED = {
    "string_type": "a string",
    "tuple_type": "a list of strings",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "dataclass_type": "a table",
    "model_type": "a table",
}
_MISSING = {"key": "a list of strings", "labels": "a list of strings", "prompt": "a table", "output": "a table"}


def parse_workload_file(text: str, path: Path) -> WorkloadFile:
    """The values of a file, checked.

    Args:
        path: of the file, for messages; its query is looked for beside it.
    Raises:
        WorkloadError: it is not TOML, or a value is wrong; the message names file, table and key.
    """
    try:
        values = tomllib.loads(text)
        return _FILE.validate_python(values, context=path.parent)
    except tomllib.TOMLDecodeError as error:
        raise WorkloadError(f"{path} cannot be read as TOML: {error}") from error
    except pydantic.ValidationError as error:
        raise WorkloadError(f"{path}: {_describe_fault(error.errors()[0], values)}") from error


def _describe_fault(fault: ErrorDetails, values: Mapping[str, Any]) -> str:
    """A fault in a line: table, key, what was expected, what was found."""
    kind, context = fault["type"], fault.get("ctx", {})
    steps = [str(step) for step in fault["loc"][1:] if isinstance(step, str)]  # the first is the mode
    if kind == "value_error" and isinstance(fault["input"], dict):  # a whole table is wrong
        return "".join(f"[{table}]: " for table in steps) + str(context["error"])
    *tables, key = steps or ["mode"]
    for table in tables:
        values = values[table]
    where = "".join(f"[{table}]: " for table in tables)
    if kind in ("missing", "union_tag_not_found"):
        return f"{where}{key} is missing; expected {_MISSING.get(key, 'a string')}"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{where}{key!r} is not a known key here"
    if kind == "value_error":
        return f"{where}{key} {context['error']}"
    if kind == "union_tag_invalid":
        expected = context["expected_tags"].replace(", ", " or ")
    else:
        is_item = isinstance(fault["loc"][-1], int)
        expected = "a list of non-empty strings" if is_item else _EXPECTED[kind]
    return f"{where}{key} must be {expected}, got {values[key]!r}"
