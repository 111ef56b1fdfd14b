"""``thinking = "off" | "keep" | "drop"``: kinds of answer that turn a reasoning model's thinking on or off."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from typing import Any, Literal

import pyarrow as pa
from pydantic import Field, StrictInt
from pydantic.dataclasses import dataclass

from engine.completion import Completion
from tasks.answers.decide import Decisions
from tasks.answers.extract import Extraction
from tasks.answers.kind import AnswerKind, EncodeLabels
from tasks.answers.score import LabelScore
from tasks.answers.text import TextAnswer
from tasks.answers.toml_value import CONFIG, refuse_if

Switch = Literal["off", "keep", "drop"]

THINKING_COLUMN = "thinking"


@plain_dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Takes the place of `engine.Thinking` in the settings of a request until the model is known."""

    max_tokens: int


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class _Switched(AnswerKind):
    """A kind whose prompts set the chat template's switch for thinking. If it is decoded, its answers may follow
    thoughts, which are kept in a column of their own or dropped."""

    switch: Switch = Field(alias="thinking")
    max_thinking_tokens: StrictInt = 0

    @property
    def thinking(self) -> str:  # type: ignore[override]
        return self.switch

    @property
    def is_kept(self) -> bool:
        """Whether the output table has a column with the thoughts."""
        return self.switch == "keep"

    @property
    def digest_parts(self) -> list[Any]:
        return [*super().digest_parts, self.switch, *([self.max_thinking_tokens] if self.is_decoded else [])]

    @property
    def columns(self) -> Mapping[str, str]:
        return {**super().columns, **({THINKING_COLUMN: "VARCHAR"} if self.is_kept else {})}

    @property
    def written(self) -> Mapping[str, str]:
        place = "answer" if self.is_typed else THINKING_COLUMN
        return {**super().written, **({THINKING_COLUMN: place} if self.is_kept else {})}

    @property
    def part_fields(self) -> Sequence[pa.Field]:
        return [*super().part_fields, *([pa.field(THINKING_COLUMN, pa.string())] if self.is_kept else [])]

    @property
    def max_answer_tokens(self) -> int:
        return super().max_answer_tokens + self.max_thinking_tokens

    def check(self, key: Sequence[str]) -> None:
        super().check(key)
        most, thinks = self.max_thinking_tokens, self.switch != "off"
        refuse = f"thinking must be 'off' where nothing is decoded, got {self.switch!r}"
        refuse_if(thinks and not self.is_decoded, refuse)  # the first token after the prompt is the answer
        refuse_if(thinks and most < 1, f"thinking = {self.switch!r} needs max_thinking_tokens, a number of tokens")
        refuse_if(not thinks and most, "max_thinking_tokens belongs to thinking = 'keep' or 'drop'")
        names = [name.lower() for name in super().columns]
        refuse_if(self.is_kept and THINKING_COLUMN in names, f"thinking = 'keep' writes a column {THINKING_COLUMN!r}")

    def ask(self, encode_labels: EncodeLabels, expected_output_tokens: int | None) -> Sequence[Mapping[str, Any]]:
        asked = super().ask(encode_labels, expected_output_tokens)
        if self.switch == "off":
            return asked
        (settings,) = asked
        most = settings["max_new_tokens"] + self.max_thinking_tokens
        return [{**settings, "max_new_tokens": most, "thinking": ThinkingBudget(self.max_thinking_tokens)}]

    def read(self, completion: Completion, decode: Callable[[Sequence[int]], str]) -> Mapping[str, Any]:
        values = dict(super().read(completion, decode))
        if self.is_kept:
            thoughts = decode([int(token) for token in completion.thinking_token_ids]).strip()
            values[THINKING_COLUMN] = thoughts = thoughts.rstrip("\ufffd").rstrip()  # a character cut by the budget
            if self.is_typed and "answer" in values:
                values["answer"] = f'{values["answer"][:-1]}, "{THINKING_COLUMN}": {json.dumps(thoughts)}}}'
        return values


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class ThinkingText(_Switched, TextAnswer):  # type: ignore[override]  # here, fields of parts are a property
    """A generated text."""


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class ThinkingExtraction(_Switched, Extraction):
    """Typed columns, or one JSON column."""


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class SilentScore(_Switched, LabelScore):  # type: ignore[override]
    """A choice among labels."""


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class SilentDecisions(_Switched, Decisions):
    """Answers to questions."""

    @property
    def question_digests(self) -> Mapping[str, str]:
        return {name: f"{digest}-{self.switch}" for name, digest in super().question_digests.items()}


_KINDS: Mapping[type[AnswerKind], type[AnswerKind]] = {
    TextAnswer: ThinkingText,
    Extraction: ThinkingExtraction,
    LabelScore: SilentScore,
    Decisions: SilentDecisions,
}


def find_thinking_kind(kind: type[AnswerKind], prompt: object) -> type[AnswerKind]:
    """The kind with the additional keys ``thinking`` and ``max_thinking_tokens``; `ValueError` if there is none."""
    is_plain = isinstance(prompt, dict) and prompt.get("chat") is False
    refuse_if(is_plain or kind not in _KINDS, "thinking is a switch of chat templates, and the prompt is plain text")
    return _KINDS[kind]
