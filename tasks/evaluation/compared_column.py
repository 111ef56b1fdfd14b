"""Matches columns of the answers with columns of gold, and decides how their values are compared."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import duckdb

from engine.errors import DatabaseError
from tasks.answers.reserved_names import RESERVED_COLUMNS
from tasks.answers.thinking import THINKING_COLUMN
from tasks.database.connection import execute
from tasks.database.messages import explain
from tasks.workloads.workload import Workload

Kind = Literal["label", "text", "number", "value", "probability", "rank"]

NUMBER_TYPES = frozenset(
    ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT", "UHUGEINT")
) | {"FLOAT", "DOUBLE"}

RELEVANCE = "relevance"
"""Column of gold with the relevance grade of a row, 0 or above, for workloads that rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedColumn:
    """A column of the answers and the column of gold with its expected values.

    Attributes:
        name, expected: the answers' column, and the column of gold.
        kind: of the values; a "label" is one of a few names, a "value" anything else that is equal or not.
        probability: the answers' column with the model's probabilities; empty for none.
        labels: allowed labels of gold; empty for any.
        true_label: for a probability or a rank that is compared with labels, the label that counts as true; None if
            gold holds truth values or grades.
        is_graded: a score of labels: of two runs only the distance says something, not whether they are equal.
    """

    name: str
    expected: str
    kind: Kind
    probability: str = ""
    labels: tuple[str, ...] = ()
    true_label: str | None = None
    is_nullable: bool = False
    is_graded: bool = False


def list_gold_columns(connection: duckdb.DuckDBPyConnection, gold: str) -> dict[str, str]:
    """The columns of a gold table or view, named as in SQL with a schema and quotes where they are needed, with their
    types. Raises `DatabaseError` if there is no such table or view."""
    try:
        rows = execute(connection, "gold/gold_columns", {"gold": gold})
    except duckdb.Error as error:
        raise DatabaseError(f"gold {gold!r}: {explain(error)}") from error
    return {column[0]: str(column[1]) for column in rows.description or ()}


def match_columns(
    workload: Workload, gold: str, gold_types: Mapping[str, str], answer_types: Mapping[str, str]
) -> list[ComparedColumn]:
    """The columns to compare, matched by name. Raises `DatabaseError` if gold lacks a column of the key, has a column
    that is not answered, or has only the key.

    Args:
        gold, gold_types: name of the table of gold rows, for messages, and its columns with their types.
        answer_types: columns and types of the workload's view of newest answers.
    """
    key = [name.lower() for name in workload.key]
    gold_columns = {name.lower(): name for name in gold_types}
    for name in workload.key:
        if name.lower() not in gold_columns:
            raise DatabaseError(
                f"gold table {gold!r} has no column {name!r} of the key; it has {', '.join(gold_types)}"
            )
    judged = {name: spelled for name, spelled in gold_columns.items() if name not in key}
    answered = {
        name.lower(): name
        for name in answer_types
        if name.lower() not in (*key, *RESERVED_COLUMNS) and not _is_about_another(name, answer_types)
    }
    ranks = answered.pop("rank", None) if workload.kind.rank_within else None
    known = [*answered.values(), *([RELEVANCE] if ranks else [])]
    found = []
    for name, spelled in judged.items():
        if name in answered:
            found.append(_compare(workload, answered[name], spelled, gold_types[spelled], answer_types))
        elif not (workload.kind.rank_within and name == RELEVANCE):  # of a sample nothing is ranked
            raise DatabaseError(
                f"gold table {gold!r} has a column {spelled!r}, which workload {workload.name!r} does not answer; "
                f"it answers {', '.join(known)}"
            )
    found += _compare_labels(workload, judged, ranks)
    if not found:
        raise DatabaseError(f"gold table {gold!r} has no column to compare; the answers have {', '.join(known)}")
    return found


def list_columns(workload: Workload, answer_types: Mapping[str, str]) -> list[ComparedColumn]:
    """The answers' columns by which two runs are compared: all but probabilities, ranks and thoughts, and the only
    label of a reranker. `answer_types` has columns and types of the workload's view of newest answers."""
    labels = workload.kind.score_labels
    skipped = {*(name.lower() for name in workload.key), *RESERVED_COLUMNS, *(("rank",) if labels else ())}
    skipped |= {"label"} if len(labels) == 1 else set()
    skipped |= {THINKING_COLUMN} if workload.kind.thinking == "keep" else set()
    return [
        ComparedColumn(name=name, expected=name, kind="number", is_graded=True)
        if labels and name.lower() == "score"
        else _compare(workload, name, name, "", answer_types)
        for name in answer_types
        if name.lower() not in skipped and not _is_about_another(name, answer_types)
    ]


def _compare_labels(workload: Workload, gold_columns: Mapping[str, str], ranks: str | None) -> list[ComparedColumn]:
    """Comparisons of labels and grades of gold with other columns: the score, and ranks by it."""
    found = []
    labels, label = workload.kind.score_labels, gold_columns.get("label")
    true_label = labels[workload.kind.score_index] if labels and label else None
    make = partial(ComparedColumn, expected=label or "", labels=labels, true_label=true_label)
    if true_label and "score" not in gold_columns:
        found.append(make(name="score", kind="probability"))
    if ranks and RELEVANCE in gold_columns:
        found.append(ComparedColumn(name=ranks, expected=gold_columns[RELEVANCE], kind="rank"))
    elif ranks and true_label:
        found.append(make(name=ranks, kind="rank"))
    return found


def _compare(
    workload: Workload, name: str, expected: str, gold_type: str, answer_types: Mapping[str, str]
) -> ComparedColumn:
    if workload.kind.score_labels and name.lower() == "label":
        return ComparedColumn(
            name=name, expected=expected, kind="label", probability="label_logprobs", labels=workload.kind.score_labels
        )
    if workload.kind.score_labels and name.lower() == "score":
        return ComparedColumn(name=name, expected=expected, kind="probability")
    probability = next((other for other in answer_types if other.lower() in _names_of_probabilities(name)), "")
    return ComparedColumn(
        name=name,
        expected=expected,
        kind=_kind_of(answer_types[name], gold_type, is_chosen=bool(probability)),
        probability=probability,
        labels=workload.kind.column_labels.get(name, ()),
        is_nullable=name in workload.kind.nullable_columns,
    )


def _kind_of(answer_type: str, gold_type: str, *, is_chosen: bool) -> Kind:
    if answer_type.endswith("]"):
        return "value"
    if answer_type in NUMBER_TYPES or answer_type.startswith("DECIMAL"):
        return "number"
    if answer_type == "BOOLEAN" or answer_type.startswith("ENUM"):
        return "label"
    if answer_type == "VARCHAR":
        return "label" if is_chosen or gold_type.startswith("ENUM") else "text"
    return "value"


def _names_of_probabilities(name: str) -> tuple[str, str]:
    return f"{name}_probability".lower(), f"{name}_probabilities".lower()


def _is_about_another(name: str, answer_types: Mapping[str, str]) -> bool:
    """Whether a column holds probabilities of another column, or is a MAP, which no answer is."""
    if answer_types[name].startswith("MAP("):
        return True
    names = {about for other in answer_types for about in _names_of_probabilities(other)}
    return name.lower() in names or name.lower() == "label_logprobs"
