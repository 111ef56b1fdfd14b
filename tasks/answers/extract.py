"""``mode = "extract"``: typed columns, read from one constrained JSON answer for each row."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, ClassVar

import pyarrow as pa
from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, StrictInt
from pydantic.dataclasses import dataclass

from engine.completion import Completion
from tasks.answers.column_grammar import Bounds, count_values, leaf_ids, object_grammar, value_grammar
from tasks.answers.duckdb_type import parse_type
from tasks.answers.grammar_source import GrammarSource, SchemaText, constrained_answer
from tasks.answers.kind import EncodeLabels, SingleRequest
from tasks.answers.reserved_names import RESERVED_COLUMNS
from tasks.answers.text import Decoding
from tasks.answers.toml_value import CONFIG, Name, Output, refuse_if

MOST_VALUES = 4096
"""Most values that fixed arrays of a column may hold in a row: DuckDB writes 2,048 rows at a time, all in memory."""


def _read_type(text: str) -> str:
    type_ = parse_type(text)
    if (num_values := count_values(type_)) > MOST_VALUES:
        fit = f"at most {MOST_VALUES:,} fit: leave the size of the array out"
        raise ValueError(f"{text!r} holds {num_values:,} values in each row, {fit}")
    value_grammar(type_, Bounds())
    return str(type_)


@dataclass(frozen=True, slots=True, kw_only=True, config=CONFIG)
class Column(Bounds):
    """One column of the answer.

    Attributes:
        type: DuckDB type, spelled as DuckDB does.
        not_null: the model must give a value even if the text has none.
    """

    type: Annotated[str, AfterValidator(_read_type)]
    ask: str = ""
    not_null: StrictBool = False

    @property
    def grammar(self) -> str:
        """The grammar of the column's values."""
        value = value_grammar(parse_type(self.type), self)
        return value if self.not_null else f'({value} | "null")'

    def check(self) -> None:
        """Raise `ValueError` if a bound has no effect, or no value satisfies all bounds."""
        kinds = leaf_ids(parse_type(self.type))
        for name, is_given, needed in (
            ("max_chars", self.max_chars, "varchar"),
            ("pattern", self.pattern, "varchar"),
            ("max_items", self.max_items, "list"),
        ):
            refuse_if(is_given and needed not in kinds, f"{name} needs a {needed.upper()} in the type {self.type}")
        GrammarSource("lark", f"start: {self.grammar}").check()
        if self.pattern:
            GrammarSource("schema", self.string_schema).check()


Columns = dict[
    str,
    Annotated[Column, BeforeValidator(lambda value: {"type": value} if isinstance(value, str) else value)],
]


@dataclass(frozen=True, slots=True, kw_only=True, config=CONFIG)
class ExtractDecoding(Decoding):
    """How columns are generated: an object may be longer than a text."""

    max_new_tokens: StrictInt = 256


@dataclass(frozen=True, slots=True, kw_only=True, config=CONFIG)
class ExtractOutput(Output):
    """The table ``[output]`` of extracted columns; an answer with a schema has one JSON column of this name."""

    answer_column: Name = ""


@dataclass(frozen=True, slots=True, kw_only=True, config=CONFIG)
class Extraction(SingleRequest):
    """Typed columns, or one JSON column that a JSON schema describes."""

    mode: ClassVar[str] = "extract"
    is_decoded: ClassVar[bool] = True

    asked: Columns = Field(default_factory=dict, alias="columns")
    schema: SchemaText = ""
    decoding: ExtractDecoding = ExtractDecoding()
    output: ExtractOutput

    @property
    def digest_parts(self) -> list[Any]:
        columns = [[name, asdict(column)] for name, column in self.asked.items()]
        return [self.decoding.digest_parts, self.schema, columns]

    @property
    def columns(self) -> Mapping[str, str]:
        if self.schema:
            return {self.output.answer_column: "JSON"}
        return {name: column.type for name, column in self.asked.items()}

    @property
    def written(self) -> Mapping[str, str]:
        return dict.fromkeys(self.columns, "answer")

    @property
    def part_fields(self) -> Sequence[pa.Field]:
        return (pa.field("answer", pa.string()), pa.field("token_ids", pa.list_(pa.int32())))

    @property
    def nullable_columns(self) -> Sequence[str]:
        """Columns whose value a text may lack."""
        return [name for name, column in self.asked.items() if not column.not_null]

    @property
    def is_typed(self) -> bool:  # type: ignore[override]
        return not self.schema

    @property
    def max_answer_tokens(self) -> int:
        return self.decoding.max_new_tokens

    @property
    def grammar(self) -> GrammarSource:
        """Which answers are allowed."""
        if self.schema:
            return GrammarSource("schema", self.schema)
        columns = object_grammar({name: column.grammar for name, column in self.asked.items()})
        return GrammarSource("lark", f"start: {columns}")

    @property
    def instructions(self) -> str:
        if self.schema:
            return f"Answer with JSON on one line that this JSON schema allows:\n{self.schema}"
        first, nullable = "Answer with one JSON object on one line, with these fields", self.nullable_columns
        if nullable:
            where = "a field" if len(nullable) == len(self.asked) else ", ".join(nullable)
            first += f"; {where} is null where the text does not say"
        lines = [f"- {name} ({c.type})" + (f": {c.ask}" if c.ask else "") for name, c in self.asked.items()]
        return "\n".join([f"{first}:", *lines])

    def check(self, key: Sequence[str]) -> None:
        """See `AnswerKind.check`."""
        refuse_if(bool(self.asked) == bool(self.schema), "mode 'extract' needs either [columns] or a schema")
        refuse_if(self.decoding.has_grammar, "[decoding]: pattern and schema belong to mode 'generate'")
        why = "[decoding]: stop belongs to mode 'generate': the columns say where an answer ends"
        refuse_if(self.decoding.stop, why)
        name = self.output.answer_column
        refuse_if(self.schema and not name.strip(), "[output]: answer_column is missing; expected a string")
        refuse_if(self.asked and name, "[output]: answer_column belongs to a schema; [columns] name their own")
        refuse_if(name.lower() in RESERVED_COLUMNS, f"[output]: answer_column may not be {name!r}")
        named: set[str] = set()
        for column_name, column in self.asked.items():
            try:
                refuse_if(column_name.lower() in named, "an earlier column has this name; case does not matter")
                named.add(column_name.lower())
                refuse_if(not (column_name.strip() and column_name.isprintable()), "a column needs a printable name")
                refuse_if(column_name.lower() in RESERVED_COLUMNS, "batchloom writes a column of this name itself")
                column.check()
            except ValueError as error:
                raise ValueError(f"[columns]: {column_name}: {error}") from error
        try:
            self.grammar.check()
        except ValueError as error:
            raise ValueError(f"{'schema' if self.schema else '[columns]'}: {error}") from error

    def ask(self, encode_labels: EncodeLabels, expected_output_tokens: int | None) -> Sequence[Mapping[str, Any]]:
        settings = self.decoding.settings | {"grammar": self.grammar}
        return [settings | {"mode": "generate", "expected_output_tokens": expected_output_tokens}]

    def read(self, completion: Completion, decode: Callable[[Sequence[int]], str]) -> Mapping[str, Any]:
        return constrained_answer(completion, decode)
