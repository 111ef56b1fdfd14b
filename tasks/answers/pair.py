"""Two workloads in one batch over the same rows: each row makes the requests of both."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from engine.completion import Completion
from tasks.answers.kind import AnswerKind, EncodeLabels, SingleRequest
from tasks.answers.toml_value import Output


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedAnswers(SingleRequest):
    """A row makes the requests of the first kind, then those of the second; row ids count requests. No workload file
    can name this kind, and its answers are not written to a table. `settings` are `RequestForm.settings` of both; the
    second workload's earlier answers, in its output, give the expected length."""

    mode: ClassVar[str] = "compare"

    kinds: tuple[AnswerKind, AnswerKind]
    settings: tuple[Mapping[str, Any], ...]
    output: Output

    def place(self, row_id: int) -> tuple[int, int, int]:
        """Of a request: its row, its workload (0: the first, 1: the second), and its number within the workload."""
        row, number = divmod(row_id, len(self.settings))
        num_first = len(self.kinds[0].suffixes)
        return (row, 0, number) if number < num_first else (row, 1, number - num_first)

    @property
    def digest_parts(self) -> list[Any]:
        return [[kind.mode, *kind.digest_parts] for kind in self.kinds]

    @property
    def columns(self) -> Mapping[str, str]:
        return {"answer": "text"}

    @property
    def max_answer_tokens(self) -> int:
        return max(kind.max_answer_tokens for kind in self.kinds)

    def ask(self, encode_labels: EncodeLabels, expected_output_tokens: int | None) -> Sequence[Mapping[str, Any]]:
        return self.settings

    def read(self, completion: Completion, decode: Callable[[Sequence[int]], str]) -> Mapping[str, Any]:
        """The values as one JSON text, because the two kinds may have different columns."""
        _, side, number = self.place(int(completion.request_id))
        values = self.kinds[side].read(replace(completion, request_id=str(number)), decode)
        error = values.get("error")
        return {"answer": json.dumps(dict(values), default=str)} | ({"error": error} if error else {})
