"""``mode = "decide"``: typed answers to several questions about a row, with their probabilities."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

import pyarrow as pa
from pydantic import AfterValidator
from pydantic.dataclasses import dataclass

from engine.completion import Completion
from tasks.answers.duckdb_type import parse_type
from tasks.answers.kind import AnswerKind, EncodeLabels
from tasks.answers.reserved_names import RESERVED_COLUMNS
from tasks.answers.toml_value import CONFIG, Output, Text, must, refuse_if

STATES_COLUMN = "question_states"
"""Column of the output table with the state of each question of the row, and the question's digest."""

STATES_TYPE = "MAP(VARCHAR, STRUCT(digest VARCHAR, finish_reason VARCHAR, error VARCHAR))"

MOST_LABELS = 100

_SCORE = re.compile(r"SCORE\s*\(\s*(-?\d{1,9})\s*,\s*(-?\d{1,9})\s*\)", re.IGNORECASE)
_EXPECTED = "must be BOOLEAN, ENUM('a', 'b', ...) or SCORE(1, 5)"


@cache
def find_labels(type_: str) -> tuple[Literal["boolean", "enum", "score"], tuple[str, ...]]:
    """The kind of a question's type, and the labels that the model chooses from; `ValueError`, whose message follows
    the key ``type``, if the type is not supported."""
    if match := _SCORE.fullmatch(type_.strip()):
        low, high = int(match[1]), int(match[2])
        refuse_if(not low < high < low + MOST_LABELS, f"must have from 2 to {MOST_LABELS} scores, got {type_!r}")
        return "score", tuple(map(str, range(low, high + 1)))
    try:
        parsed = parse_type(type_)
    except ValueError as error:
        raise ValueError(f"{_EXPECTED}; {error}") from error
    if parsed.id == "boolean":
        return "boolean", ("yes", "no")
    refuse_if(parsed.id != "enum", f"{_EXPECTED}, got {type_!r}")
    labels = tuple(parsed.children[0][1])
    is_choice = 2 <= len(labels) <= MOST_LABELS and all(label.strip() for label in labels)
    refuse_if(not is_choice, f"must have from 2 to {MOST_LABELS} labels, none of them empty, got {type_!r}")
    return "enum", labels


def _check_names(questions: dict[str, "Question"]) -> dict[str, "Question"]:
    columns = sorted(column.lower() for name, question in questions.items() for column in question.columns(name))
    refuse_if(not questions, "must hold at least one question")
    for name in questions:
        is_name = name.strip() and name.isprintable() and len(name) <= 128
        refuse_if(not is_name, f"must have printable names of at most 128 characters, got {name!r}")
    for column, following in pairwise(columns):
        refuse_if(column == following, f"give the column {column!r} twice")
    for column in columns:
        refuse_if(column in RESERVED_COLUMNS, f"may not give the column {column!r}, which batchloom writes itself")
    return questions


@dataclass(frozen=True, slots=True, kw_only=True, config=CONFIG)
class Question:
    """One question about a row.

    Attributes:
        type: BOOLEAN, ENUM('a', 'b', ...), or SCORE(a, b): the expected value over the whole numbers a to b.
    """

    type: Annotated[str, must(find_labels, _EXPECTED)]
    ask: Text

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels that the model chooses from."""
        return find_labels(self.type)[1]

    def columns(self, name: str) -> dict[str, str]:
        """Columns of the output table that answer the question, with their DuckDB types."""
        match find_labels(self.type)[0]:
            case "boolean":
                return {name: "BOOLEAN", f"{name}_probability": "DOUBLE"}
            case "enum":
                return {name: "VARCHAR", f"{name}_probabilities": "MAP(VARCHAR, DOUBLE)"}
        return {name: "DOUBLE"}

    def read(self, name: str, logprobs: Sequence[float]) -> dict[str, Any]:
        """The values of its `columns`, from natural logarithms of the labels' normalised probabilities."""
        kind, labels = find_labels(self.type)
        probabilities = [math.exp(logprob) for logprob in logprobs]
        if kind == "score":
            expectation = math.fsum(int(label) * each for label, each in zip(labels, probabilities, strict=True))
            return {name: expectation / math.fsum(probabilities)}
        best = max(range(len(labels)), key=probabilities.__getitem__)
        if kind == "boolean":
            return {name: best == 0, f"{name}_probability": probabilities[0]}
        return {name: labels[best], f"{name}_probabilities": list(zip(labels, probabilities, strict=True))}


ARROW_TYPES = {
    "BOOLEAN": pa.bool_(),
    "VARCHAR": pa.string(),
    "DOUBLE": pa.float64(),
    "MAP(VARCHAR, DOUBLE)": pa.map_(pa.string(), pa.float64()),
}


@dataclass(frozen=True, slots=True, kw_only=True, config=CONFIG)
class Decisions(AnswerKind):
    """Answers to questions. Each question is one request, whose prompt is the row's text followed by a suffix, made of
    ``{question}`` and ``{options}``. The questions' names are columns of the output table."""

    mode: ClassVar[str] = "decide"
    has_labels: ClassVar[bool] = True

    questions: Annotated[dict[str, Question], AfterValidator(_check_names)]
    question_template: Annotated[Text, must(lambda text: "{question}" in text, "must hold {{question}}, got {!r}")] = (
        "\n\n{question}\nAnswer with one of: {options}."
    )
    output: Output

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The text after the row's own, for each question."""
        return tuple(
            ", ".join(question.labels).join(
                part.replace("{question}", question.ask) for part in self.question_template.split("{options}")
            )
            for question in self.questions.values()
        )

    @property
    def question_digests(self) -> Mapping[str, str]:
        """Each question's name to a sha256 over everything that decides its answers, except the row and its prompt."""
        parts = {
            name: [name, find_labels(question.type), suffix]
            for (name, question), suffix in zip(self.questions.items(), self.suffixes, strict=True)
        }
        return {name: hashlib.sha256(json.dumps(part).encode()).hexdigest() for name, part in parts.items()}

    @property
    def question_columns(self) -> Sequence[Sequence[str]]:
        return [list(question.columns(name)) for name, question in self.questions.items()]

    @property
    def digest_parts(self) -> list[Any]:
        return list(self.question_digests.values())

    @property
    def columns(self) -> Mapping[str, str]:
        found: dict[str, str] = {}
        for name, question in self.questions.items():
            found |= question.columns(name)
        return {**found, STATES_COLUMN: STATES_TYPE}

    @property
    def column_labels(self) -> Mapping[str, tuple[str, ...]]:
        found = {name: find_labels(question.type) for name, question in self.questions.items()}
        return {name: labels for name, (kind, labels) in found.items() if kind == "enum"}

    @property
    def part_fields(self) -> Sequence[pa.Field]:
        return [pa.field(name, ARROW_TYPES[type_]) for name, type_ in self.columns.items() if type_ in ARROW_TYPES]

    def ask(self, encode_labels: EncodeLabels, expected_output_tokens: int | None) -> Sequence[Mapping[str, Any]]:
        return [
            {"mode": "score", "labels": encode_labels(question.labels, suffix)}
            for question, suffix in zip(self.questions.values(), self.suffixes, strict=True)
        ]

    def read(self, completion: Completion, decode: Callable[[Sequence[int]], str]) -> Mapping[str, Any]:
        name, question = [*self.questions.items()][int(completion.request_id) % len(self.questions)]
        return question.read(name, [float(logprob) for logprob in completion.label_logprobs])
