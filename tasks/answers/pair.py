"""Two workloads asked about the same rows in one batch: each row makes two requests, one of each workload."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.request import Completion
from tasks.answers.kind import AnswerKind, EncodeLabels, SingleRequest
from tasks.answers.toml_value import Output


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedAnswers(SingleRequest):
    """Requests with an even row id are answered as the first kind, those with an odd one as the second.

    No file names it: it has a mode for messages alone, and its answers are written nowhere.

    Attributes:
        kinds: of the two workloads.
        settings: what `RequestForm` says of each.
        output: of the second workload; its earlier answers say how long answers are.
    """

    mode: ClassVar[str] = "compare"

    kinds: tuple[AnswerKind, AnswerKind]
    settings: tuple[Mapping[str, Any], Mapping[str, Any]]
    output: Output

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
        values = self.kinds[int(completion.request_id) % 2].read(completion, decode)
        error = values.get("error")
        return {"answer": json.dumps(dict(values), default=str)} | ({"error": error} if error else {})
