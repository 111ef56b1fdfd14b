"""Two workloads asked about the same rows in one batch: each row makes the requests of both."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from engine.request import Completion
from tasks.answers.kind import AnswerKind, EncodeLabels, SingleRequest
from tasks.answers.toml_value import Output


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedAnswers(SingleRequest):
    """A row makes the first kind's requests, then the second's; row ids count requests.

    No file names it: it has a mode for messages alone, and its answers are written nowhere.

    Attributes:
        kinds: of the two workloads.
        settings: what `RequestForm` says of each request of a row.
        output: of the second workload; its earlier answers say how long answers are.
    """

    mode: ClassVar[str] = "compare"

    kinds: tuple[AnswerKind, AnswerKind]
    settings: tuple[Mapping[str, Any], ...]
    output: Output

    @property
    def num_first(self) -> int:
        """Requests of a row that are the first kind's."""
        return len(self.kinds[0].suffixes)

    def place(self, row_id: int) -> tuple[int, int, int]:
        """The row that a request is about, whose it is (0: the first workload's, 1: the second's), its number there."""
        row, number = divmod(row_id, len(self.settings))
        return (row, 0, number) if number < self.num_first else (row, 1, number - self.num_first)

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
        """As JSON, since the two may have different columns."""
        _, side, number = self.place(int(completion.request_id))
        values = self.kinds[side].read(replace(completion, request_id=str(number)), decode)
        error = values.get("error")
        return {"answer": json.dumps(dict(values), default=str)} | ({"error": error} if error else {})
