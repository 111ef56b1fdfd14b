"""The same rows as two workloads answer them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from engine.errors import WorkloadError
from tasks.answers.kind import AnswerKind
from tasks.answers.thinking import THINKING_COLUMN
from tasks.sample import AnsweredRow
from tasks.workloads.workload import Workload


class PairedRow(NamedTuple):
    """A row with the answers of the first and the second workload; its key is as the second one spells it."""

    first: AnsweredRow
    second: AnsweredRow


def list_changed(rows: Sequence[PairedRow], kinds: tuple[AnswerKind, AnswerKind]) -> list[PairedRow]:
    """The rows whose two answers differ; probabilities, scores of several labels and thoughts are ignored, and so are
    columns that only one workload has, unless both have none in common. `kinds` are those of the first and the
    second."""
    counted = [{name.lower() for name in kind.columns.keys() - _list_ignored(kind)} for kind in kinds]
    first, second = (counted[0] & counted[1] or own for own in counted)

    def judge(side: AnsweredRow, names: set[str]) -> object:
        return side.error is None, {name: value for name, value in list_values(side).items() if name in names}

    return [row for row in rows if judge(row.first, first) != judge(row.second, second)]


def list_values(row: AnsweredRow) -> dict[str, Any]:
    """The row's answers by their columns' names in lower case: DuckDB ignores case."""
    return {name.lower(): value for name, value in row.answer.items()}


def _list_ignored(kind: AnswerKind) -> set[str]:
    """The columns of answers that say how sure the model is, or how it came to the answer."""
    ignored = {"score", "label_logprobs"} if kind.score_labels else set()
    if len(kind.score_labels) == 1:  # as of a reranker with one output, whose score is its answer
        ignored = {"label", "label_logprobs"}
    if kind.question_digests:
        ignored.update(kind.columns.keys() - {columns[0] for columns in kind.question_columns})
    return ignored | ({THINKING_COLUMN} if kind.thinking == "keep" else set())


def check_comparable(first: Workload, second: Workload) -> None:
    """Raise `WorkloadError` if the workloads' keys or adapters differ, or one gives embeddings."""
    for each in (first, second):
        if each.kind.mode == "embed":
            raise WorkloadError(f"{each.name!r} gives embeddings, which cannot be compared row by row")
    if [name.lower() for name in first.key] != [name.lower() for name in second.key]:
        raise WorkloadError(
            f"{first.name!r} and {second.name!r} answer different rows: "
            f"their keys are {list(first.key)} and {list(second.key)}"
        )
    if first.adapter != second.adapter:
        raise WorkloadError(f"{first.name!r} and {second.name!r} have different adapters, which compare does not take")
