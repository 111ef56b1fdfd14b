"""``mode = "generate"``: an answer is a text that the model writes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import pydantic
from pydantic import StrictFloat, StrictInt
from pydantic.dataclasses import dataclass

from engine.request import Completion, Request
from tasks.answers.kind import AnswerKind, EncodeLabels
from tasks.answers.toml_value import CONFIG, RESERVED_COLUMNS, Name, Output, Texts, must


@dataclass(frozen=True, slots=True, kw_only=True, config=CONFIG)
class Decoding:
    """How an answer is generated; names and ranges of `engine.Request`."""

    max_new_tokens: StrictInt = 64
    temperature: StrictFloat = 0.0
    top_k: StrictInt = 0
    top_p: StrictFloat = 1.0
    seed: StrictInt = 0
    stop: Texts = ()

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        Request(request_id="every row", token_ids=np.zeros(1, np.int32), **asdict(self))
        return self


@dataclass(frozen=True, slots=True, kw_only=True, config=CONFIG)
class TextOutput(Output):
    """Where texts go.

    Attributes:
        answer_column: of the table; holds the text.
    """

    answer_column: Annotated[
        Name,
        must(str.strip, "must not be empty"),
        must(
            lambda name: name.lower() not in RESERVED_COLUMNS, "may not be {!r}, a column that batchloom writes itself"
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True, config=CONFIG)
class TextAnswer(AnswerKind):
    """A generated text."""

    mode: ClassVar[str] = "generate"
    is_decoded: ClassVar[bool] = True
    rank_within: ClassVar[str] = ""

    decoding: Decoding = Decoding()
    output: TextOutput

    @property
    def digest_parts(self) -> list[Any]:
        return [asdict(self.decoding), []]

    @property
    def columns(self) -> Mapping[str, str]:
        return {self.output.answer_column: "text"}

    @property
    def written(self) -> Mapping[str, str]:
        return {self.output.answer_column: "answer"}

    @property
    def max_answer_tokens(self) -> int:
        return self.decoding.max_new_tokens

    def check(self, key: Sequence[str]) -> None:
        pass

    def ask(self, encode_labels: EncodeLabels, expected_output_tokens: int | None) -> Sequence[Mapping[str, Any]]:
        return [asdict(self.decoding) | {"mode": "generate", "expected_output_tokens": expected_output_tokens}]

    def read(self, completion: Completion, decode: Callable[[Sequence[int]], str]) -> Mapping[str, Any]:
        token_ids = [int(token) for token in completion.token_ids]
        return {"answer": _cut(decode(token_ids), self.decoding.stop), "token_ids": token_ids}


def _cut(text: str, stop: tuple[str, ...]) -> str:
    """The answer up to the first stop string, without white space around it."""
    ends = [end for end in (text.find(string) for string in stop) if end >= 0]
    return text[: min(ends, default=len(text))].strip()
