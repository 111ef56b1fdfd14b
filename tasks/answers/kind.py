"""The interface of a kind of answer: its keys in a workload's file, its requests, columns and values."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

import pyarrow as pa

from engine.completion import Completion
from tasks.answers.toml_value import Output

EncodeLabels = Callable[[Sequence[str], str], Sequence[tuple[int, ...]]]
"""Gives the token ids of labels as they follow the workload's prompt with one of `AnswerKind.suffixes`; see
`TextCodec.encode_labels`."""

PLAIN_FIELDS = (
    pa.field("answer", pa.string()),
    pa.field("score", pa.float64()),
    pa.field("label", pa.string()),
    pa.field("label_logprobs", pa.list_(pa.float64())),
    pa.field("token_ids", pa.list_(pa.int32())),
)
"""Part columns of the kinds whose answers are one text or one choice."""


class AnswerKind:
    """A way to answer rows. Subclasses are frozen pydantic dataclasses whose fields are their TOML keys.

    Attributes:
        mode, thinking: the file's keys of these names.
        is_decoded: answers are decoded token by token, so that their lengths differ.
        has_labels: `ask` calls `encode_labels`, which needs a tokenizer.
        is_pooled: answers are computed from the prompt's hidden states; encoders support no other kinds. Prompts are
            plain text unless the file says otherwise.
        score_index: the index in `score_labels` of the label whose probability is the score.
        is_typed: an answer is a JSON object, whose fields are cast to the types of `columns`.
    """

    __slots__ = ()

    mode: ClassVar[str]
    is_decoded: ClassVar[bool] = False
    has_labels: ClassVar[bool] = False
    is_pooled: ClassVar[bool] = False
    thinking: ClassVar[str] = ""
    score_index: ClassVar[int] = 0
    is_typed: ClassVar[bool] = False

    output: Output

    @property
    def question_digests(self) -> Mapping[str, str]:
        """For kinds whose rows make several requests: each question's name to a digest of everything that decides its
        answers, except the row and its prompt. Empty if a row makes one request."""
        raise NotImplementedError

    @property
    def question_columns(self) -> Sequence[Sequence[str]]:
        """The columns that answer each question."""
        raise NotImplementedError

    @property
    def suffixes(self) -> Sequence[str]:
        """The text after the workload's template, for each of the requests that a row makes."""
        raise NotImplementedError

    @property
    def digest_parts(self) -> list[Any]:
        """The kind's settings that decide an answer, as JSON values; part of a row's content key."""
        raise NotImplementedError

    @property
    def columns(self) -> Mapping[str, str]:
        """Columns of the output table that hold the answer, in order, with their DuckDB types."""
        raise NotImplementedError

    @property
    def written(self) -> Mapping[str, str]:
        """Those of `columns` that are taken from parts, to their names there."""
        return {name: name for name in self.columns}

    @property
    def nullable_columns(self) -> Sequence[str]:
        """Those of `columns` in which NULL is an answer."""
        return ()

    @property
    def column_labels(self) -> Mapping[str, tuple[str, ...]]:
        """Those of `columns` that hold one of a few labels as text, to the labels."""
        return {}

    @property
    def part_fields(self) -> Sequence[pa.Field]:
        """Columns of a part that hold the values of `read`."""
        return PLAIN_FIELDS

    @property
    def max_answer_tokens(self) -> int:
        """Most tokens of an answer; 1 if nothing is decoded, because the prompt's last token gives the answer."""
        return 1

    @property
    def score_labels(self) -> tuple[str, ...]:
        """The labels of the columns ``score`` and ``label``; empty if the answer has no such columns."""
        return ()

    @property
    def rank_within(self) -> str:
        """The key column by which rows are grouped and ranked by ``score``; empty for no rank."""
        return ""

    @property
    def instructions(self) -> str:
        """Instructions about the answer, placed before the row's text; empty for none."""
        return ""

    def join(self, template: str) -> str:
        """The prompt's template with the additions of the kind's keys."""
        return template

    def bind(self, template: str, checkpoint: Path) -> tuple[Self, str]:
        """The kind and the prompt's template with the settings that the checkpoint decides; idempotent. Raises
        `ModelError` or `WorkloadError` if the checkpoint cannot give such answers, or not with these settings."""
        return self, template

    def check(self, key: Sequence[str]) -> None:
        """Raise `ValueError` if the kind's settings do not fit each other or the workload's key columns."""

    def ask(self, encode_labels: EncodeLabels, expected_output_tokens: int | None) -> Sequence[Mapping[str, Any]]:
        """Parameters of `engine.Request`, the same for all rows, for each request that a row makes. `encode_labels` may
        be called if `has_labels` is true. Raises `ModelError` or `WorkloadError` if the model does not support them."""
        raise NotImplementedError

    def read(self, completion: Completion, decode: Callable[[Sequence[int]], str]) -> Mapping[str, Any]:
        """The values of `part_fields` for one answer of the engine without an error; missing ones are null. A value for
        ``error`` makes the row an error row with this reason."""
        raise NotImplementedError


class SingleRequest(AnswerKind):
    """A kind whose rows make one request each."""

    __slots__ = ()

    question_digests: ClassVar[Mapping[str, str]] = MappingProxyType({})
    suffixes: ClassVar[Sequence[str]] = ("",)


class PlainAnswer(SingleRequest):
    """A kind whose answers are one text or one choice, in the columns of `PLAIN_FIELDS`."""

    __slots__ = ()

    part_fields: ClassVar[Sequence[pa.Field]] = PLAIN_FIELDS
    instructions: ClassVar[str] = ""


TooLong = Literal["truncate", "error"]
"""What happens to a text with more tokens than the model takes: its end is cut off, or its row gets an error."""


class PooledKind(SingleRequest):
    """An embedding, or the classes of a classification head; encoders support no other kinds."""

    __slots__ = ()

    is_pooled: ClassVar[bool] = True

    too_long: TooLong

    @property
    def pair_separator(self) -> str:
        """Control tokens between the texts of a pair; empty if there is one text."""
        return ""
