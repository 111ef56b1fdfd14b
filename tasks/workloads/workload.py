"""A workload, read from TOML and checked once: the rows, the prompt, the kind of answer, and the output table."""

import hashlib
import json
import os
import re
import string
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field, SkipValidation, StrictBool, ValidationInfo
from pydantic.dataclasses import dataclass

from engine.errors import ModelError, WorkloadError
from engine.model.adapters.adapter import Adapter, check_adapter
from engine.model.loading.checkpoint import is_plain_chat
from tasks.answers.kind import AnswerKind
from tasks.answers.reserved_names import RESERVED_COLUMNS, check_query
from tasks.answers.toml_value import CONFIG, Name, Output, Text, Texts, must, refuse_if
from tasks.workloads.fault import FOREIGN_KEYS, describe_fault
from tasks.workloads.row_layouts import RowLayouts

SHIPPED = Path(__file__).parents[2] / "workloads"

_PLAIN = re.compile("[A-Za-z0-9_-]*[A-Za-z0-9][A-Za-z0-9_-]*")


def _read_requests_sql(name: str, info: ValidationInfo) -> str:
    if info.context is None:  # a copy of a workload already holds the text
        return name
    refuse_if(Path(name).name != name, f"must be a plain file name, got {name!r}")
    places = [Path(str(folder)) / name for folder in (info.context, Path(__file__).parents[2] / "sql" / "requests")]
    found = [place for place in places if place.is_file()]
    refuse_if(not found, f"names {name!r}, found neither as {str(places[0])!r} nor as {str(places[1])!r}")
    try:
        return found[0].read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"names {name!r}, which cannot be read: {error}") from error


def _find_adapter(given: object, info: ValidationInfo) -> object:
    if isinstance(given, Adapter | None):  # a copy of a workload, or a file without an adapter
        return given
    refuse_if(not isinstance(given, str) or not given, f"must be the path of a folder, got {given!r}")
    try:
        return Adapter.find(Path(str(info.context)) / os.path.expanduser(str(given)))
    except ModelError as error:
        raise ValueError(str(error).removeprefix("adapter ")) from error


@dataclass(frozen=True, slots=True, kw_only=True, config=CONFIG)
class Prompt:
    """How a row becomes a prompt.

    Attributes:
        template: text with ``{field}`` for columns of the query; ``{{`` and ``}}`` are braces.
        system: system message; empty for none, unused if chat is false.
        chat: put the prompt into the model's chat template; else it is plain text.
        may_be_empty: fields whose NULL or blank value is an empty string instead of an error.
        cut: field whose text loses its end where the prompt is too long; empty: the row is an error.
        layout: "auto" lets nights choose the order of the template's labelled parts; see `tasks.layouts`.
    """

    template: Text
    system: str = ""
    chat: StrictBool = True
    may_be_empty: Texts = ()
    cut: str = ""
    layout: Literal["written", "auto"] = "written"

    @property
    def segments(self) -> tuple[tuple[str, str | None], ...]:
        """The template in reading order: a literal text, then the field that follows it (None at the end)."""
        return tuple((literal, field) for literal, field, _, _ in string.Formatter().parse(self.template))

    @property
    def fields(self) -> tuple[str, ...]:
        """The template's distinct fields, in reading order."""
        return tuple(dict.fromkeys(field for _, field in self.segments if field is not None))

    def with_instructions(self, text: str) -> "Prompt":
        """The prompt with a text for all rows added: to the system message, or in front of a plain template."""
        if not text:
            return self
        if self.chat:
            return replace(self, system=f"{self.system}\n\n{text}".strip())
        return replace(self, template=text.replace("{", "{{").replace("}", "}}") + "\n\n" + self.template)

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        try:
            parsed = list(string.Formatter().parse(self.template))
        except ValueError as error:
            raise ValueError(f"template cannot be read: {error}") from error
        for _, field, spec, conversion in parsed:
            written = f"{field}{f'!{conversion}' if conversion else ''}{f':{spec}' if spec else ''}"
            why = f"{{{written}}} that is not a plain column name; conversions and formats are not allowed"
            refuse_if(field is not None and not written.isidentifier(), f"template has a field {why}")
        spellings = {field.lower() for field in self.fields}
        refuse_if(len(spellings) < len(self.fields), "template names a column twice, with other capitals")
        refuse_if(not self.fields, "template must hold at least one {field}, else all prompts are the same")
        for field in self.may_be_empty:
            refuse_if(field not in self.fields, f"may_be_empty names {field!r}, which the template does not use")
        refuse_if(self.cut and self.cut not in self.fields, f"cut names {self.cut!r}, which the template does not use")
        return self


@dataclass(frozen=True, slots=True, kw_only=True, config=CONFIG | pydantic.ConfigDict(arbitrary_types_allowed=True))
class Workload:
    """One nightly job over a table.

    Attributes:
        name: unique among the workloads of a database; part of run ids.
        source: the shipped name, or the TOML file's absolute path; `load_workload(source)` reads the workload again.
        kind: of answer: what a row asks the model, and how the model's output becomes columns.
        requests_sql: text of the query that selects the rows.
        key: columns that identify a row.
        priority: whole-number column of the query; larger values are answered earlier, null is 0. Empty for none.
        adapter: LoRA adapter for the model; None for none.
        row_layouts: rows with their own order of parts; no key of the file. None for none.
    """

    name: Annotated[Name, must(_PLAIN.fullmatch, "must hold letters, digits, '-' and '_' only, got {!r}")]
    source: str
    kind: SkipValidation[AnswerKind]
    requests_sql: Annotated[Text, AfterValidator(_read_requests_sql)]
    key: Annotated[
        tuple[Annotated[Name, Field(min_length=1)], ...],
        must(
            lambda names: 0 < len({name.lower() for name in names}) == len(names),
            "must name one or more different columns, got {!r}",
        ),
    ]
    prompt: Prompt
    priority: Name = ""
    adapter: Annotated[SkipValidation[Adapter | None], BeforeValidator(_find_adapter)] = None
    row_layouts: SkipValidation[RowLayouts | None] = None

    @property
    def output(self) -> Output:
        """The output table."""
        return self.kind.output

    @property
    def digest(self) -> str:
        """sha256 over everything that decides an answer, except row and model: prompt, decoding, labels, adapter."""
        return self._hash(self.kind.digest_parts)

    @property
    def row_digest(self) -> str:
        """As `digest`, but without questions, which have digests of their own; see `AnswerKind.question_digests`."""
        return self._hash([]) if self.kind.question_digests else self.digest

    def _hash(self, parts: list[Any]) -> str:
        prompt = {name: value for name, value in asdict(self.prompt).items() if name not in ("layout", "cut")}
        parts = [self.kind.mode, prompt | ({"cut": self.prompt.cut} if self.prompt.cut else {}), *parts]
        if self.adapter is not None:
            parts.append(self.adapter.digest)
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @property
    def columns(self) -> tuple[str, ...]:
        """Key columns, then the template's fields that are not among them."""
        return tuple(dict.fromkeys(self.key + self.prompt.fields))

    @property
    def hashed_fields(self) -> list[str]:
        """The template's fields in the order of `columns`, in which a row's content key hashes their values."""
        return [name for name in self.columns if name in self.prompt.fields]

    def with_adapter(self, folder: Path | None) -> "Workload":
        """The workload with this adapter, unless its file names one; `ModelError` if the adapter is not supported."""
        return self if folder is None or self.adapter is not None else replace(self, adapter=Adapter.find(folder))

    def bind(self, checkpoint: Path) -> "Workload":
        """The workload with the settings that the model decides, see `AnswerKind.bind`. Raises `ModelError` if the
        model lacks an output layer or chat template for it, or the adapter is another's."""
        if self.adapter is not None:
            check_adapter(self.adapter, checkpoint)
        if not is_plain_chat(checkpoint):
            from tasks.workloads.model_use import check_use  # imported only when needed

            check_use(self, checkpoint)
        if not self.kind.is_pooled:
            return self
        try:
            kind, template = self.kind.bind(self.prompt.template, checkpoint)
        except WorkloadError as error:
            raise WorkloadError(f"workload {self.name!r}: {error}") from error
        return replace(self, kind=kind, prompt=replace(self.prompt, template=template))


_KINDS = {
    "generate": "text.TextAnswer",
    "score": "score.LabelScore",
    "extract": "extract.Extraction",
    "decide": "decide.Decisions",
    "embed": "embed.Embedding",
}


def find_kind(values: Mapping[str, Any]) -> type[AnswerKind]:
    """The class of a file's kind of answer; only its module is imported. `ValueError` for an unknown mode."""
    mode, is_head = values["mode"], values.get("labels") == "checkpoint"
    if mode not in tuple(_KINDS):  # a tuple, because the file's mode may be unhashable
        raise ValueError(f"mode must be 'generate', 'score', 'extract', 'decide' or 'embed', got {mode!r}")
    module, name = ("head_score.HeadScore" if mode == "score" and is_head else _KINDS[mode]).split(".")
    kind: type[AnswerKind] = getattr(import_module(f"tasks.answers.{module}"), name)
    if "thinking" in values:
        from tasks.answers.thinking import find_thinking_kind

        kind = find_thinking_kind(kind, values.get("prompt"))
    return kind


_WORKLOAD = pydantic.TypeAdapter(Workload)


def load_workload(name_or_path: str | Path) -> Workload:
    """Read a shipped workload by name, or a TOML file by path (a name that ends in ``.toml`` or holds a ``/``). Raises
    `WorkloadError` if there is none, or if a key or value of the file is missing, unknown or wrong."""
    is_path = isinstance(name_or_path, Path) or name_or_path.endswith(".toml") or "/" in name_or_path
    path = Path(name_or_path) if is_path else SHIPPED / f"{name_or_path}.toml"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        known = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.toml"))) + "; a file of your own ends in .toml"
        raise WorkloadError(f"no workload {str(name_or_path)!r}: no file {path}; shipped workloads: {known}") from error
    except (OSError, ValueError) as error:  # ValueError: bytes that are not UTF-8, or a path with a NUL
        raise WorkloadError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        values = tomllib.loads(text)
        refuse_if({"kind", "source", "row_layouts"} & values.keys(), "'kind', 'source', 'row_layouts' are no keys here")
        source = str(path.absolute()) if is_path else str(name_or_path)
        workload = _read_workload(values, source, path.parent)
        if is_path:
            check_query(workload.output.table, workload.requests_sql)
    except tomllib.TOMLDecodeError as error:
        raise WorkloadError(f"{path} cannot be read as TOML: {error}") from error
    except ValueError as error:
        raise WorkloadError(f"{path}: {describe_fault(error, values, text)}") from error
    return workload


def _read_workload(values: Mapping[str, Any], source: str, folder: Path) -> Workload:
    """Check the values of a file in `folder` and make a workload of them; keys of the answer kind become its fields."""
    refuse_if("models" in values, "a night's file, not a workload's: batchloom nightly FILE runs it")
    refuse_if("mode" not in values, "mode is missing; expected a string")
    kind = find_kind(values)
    known: Mapping[str, pydantic.fields.FieldInfo] = kind.__pydantic_fields__  # type: ignore[attr-defined]
    own_names = {field.alias or name for name, field in known.items()}
    common = {name: value for name, value in values.items() if name not in ("mode", *own_names)}
    own = {name: values[name] for name in own_names if name in values}
    if kind.is_pooled and isinstance(common.get("prompt"), dict):
        common["prompt"] = {"chat": False, **common["prompt"]}
    for name, why in FOREIGN_KEYS.items():
        refuse_if(common.pop(name, None), why)
    workload = _WORKLOAD.validate_python(common | {"source": source, "kind": None}, context=folder)
    found = pydantic.TypeAdapter(kind).validate_python(own, context=folder)
    found.check(workload.key)
    prompt = workload.prompt
    if found.is_pooled:
        refuse_if(prompt.cut, "prompt.cut is for answers of a language model; here too_long says what is cut")
        prompt = replace(prompt, template=found.join(prompt.template))
    workload = replace(workload, kind=found, prompt=prompt.with_instructions(found.instructions))
    used = {"key": workload.key, "prompt.template": workload.prompt.fields, "priority": (workload.priority,)}
    for place, columns in used.items():
        for column in columns:
            refuse_if(column.lower() in RESERVED_COLUMNS, f"{place} may not use the column name {column!r}")
    written = [column.lower() for column in (*workload.key, *workload.kind.columns)]
    refuse_if(len(set(written)) < len(written), f"key and the answer columns must all differ, got {written}")
    return workload
