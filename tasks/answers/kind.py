"""What a kind of answer says of itself: its keys in a workload's file, its requests, its columns, its values."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, Self

import pyarrow as pa

from engine.request import Completion
from tasks.answers.toml_value import Output


class EncodeLabels(Protocol):
    """Gives the token ids of labels as they follow the workload's prompt; see `TextCodec.encode_labels`."""

    def __call__(self, labels: Sequence[str], suffix: str = "") -> Sequence[tuple[int, ...]]:
        """`suffix` is one of `AnswerKind.suffixes`."""


PLAIN_FIELDS = (
    pa.field("answer", pa.string()),
    pa.field("score", pa.float64()),
    pa.field("label", pa.string()),
    pa.field("label_logprobs", pa.list_(pa.float64())),
    pa.field("token_ids", pa.list_(pa.int32())),
)
"""Of the kinds whose answers are one text or one choice."""


class AnswerKind:
    """One of the ways to answer a row. Subclasses are frozen pydantic dataclasses whose fields are their TOML keys.

    Attributes:
        mode: what a workload's file calls it.
        is_decoded: answers are decoded token by token, so that their lengths differ.
        has_labels: `ask` calls `encode_labels`, for which a tokenizer is needed.
        is_pooled: answers are made of the prompt's hidden states; encoders answer no other kinds.
        thinking: what a reasoning model does before it answers; empty for what its chat template has it do.
        has_chat: prompts are in the chat template unless the file says otherwise.
        output: the file's table of that name.
    """

    __slots__ = ()

    mode: ClassVar[str]
    is_decoded: ClassVar[bool] = False
    has_labels: ClassVar[bool] = False
    is_pooled: ClassVar[bool] = False
    thinking: ClassVar[str] = ""
    has_chat: ClassVar[bool] = True

    output: Output

    @property
    def question_digests(self) -> Mapping[str, str]:
        """Of a kind whose rows make several requests: name of each question to a digest of all that decides its answers
        apart from the row and its prompt. Empty where a row makes one request."""
        raise NotImplementedError

    @property
    def question_columns(self) -> Sequence[Sequence[str]]:
        """The columns that answer each question."""
        raise NotImplementedError

    @property
    def suffixes(self) -> Sequence[str]:
        """What follows the workload's template in each of the requests that a row makes."""
        raise NotImplementedError

    @property
    def digest_parts(self) -> list[Any]:
        """What of the kind's keys decides an answer, as JSON values; part of the content key of a row."""
        raise NotImplementedError

    @property
    def columns(self) -> Mapping[str, str]:
        """Columns of the output table that hold the answer, in its order, each with its DuckDB type."""
        raise NotImplementedError

    @property
    def written(self) -> Mapping[str, str]:
        """Those of `columns` that a part gives, each with its name there."""
        return {name: name for name in self.columns}

    @property
    def nullable_columns(self) -> Sequence[str]:
        """Those of `columns` in which NULL is an answer."""
        return ()

    @property
    def column_labels(self) -> Mapping[str, tuple[str, ...]]:
        """Those of `columns` that hold one of few names, which are text, and the names."""
        return {}

    @property
    def part_fields(self) -> Sequence[pa.Field]:
        """Columns of a part that hold what `read` gives."""
        return PLAIN_FIELDS

    @property
    def insert_statement(self) -> str:
        """The statement that writes parts to the output table."""
        return "write/insert_answers"

    @property
    def max_answer_tokens(self) -> int:
        """Most tokens of an answer; 1 where nothing is decoded, and a prompt's last row gives the answer."""
        return 1

    @property
    def score_labels(self) -> tuple[str, ...]:
        """What the columns ``score`` and ``label`` choose from; empty where the answer has no such columns."""
        return ()

    @property
    def rank_within(self) -> str:
        """The key column within which rows are ranked by their ``score``; empty for no rank."""
        return ""

    @property
    def instructions(self) -> str:
        """What the model is told of the answer, before the words of the row; empty for nothing."""
        return ""

    def join(self, template: str) -> str:
        """The prompt's template with what the kind's keys add to it."""
        return template

    def bind(self, template: str, checkpoint: Path) -> tuple[Self, str]:
        """The kind and the prompt's template with what the checkpoint decides; binding again changes nothing.

        Args:
            template: of the workload's prompt.
            checkpoint: the model's folder.
        Raises:
            ModelError, WorkloadError: the checkpoint has no such answers, or none as the keys want them.
        """
        return self, template

    def check(self, key: Sequence[str]) -> None:
        """Raise `ValueError` where the kind's keys do not fit the workload's key columns."""

    def ask(self, encode_labels: EncodeLabels, expected_output_tokens: int | None) -> Sequence[Mapping[str, Any]]:
        """Parameters of `engine.Request`, the same for all rows: of each request that a row makes.

        Args:
            encode_labels: may be called where `has_labels` is true.
            expected_output_tokens: see `AnswerLength.expected_output_tokens`.
        Raises:
            ModelError, WorkloadError: the model cannot be asked so.
        """
        raise NotImplementedError

    def read(self, completion: Completion, decode: Callable[[Sequence[int]], str]) -> Mapping[str, Any]:
        """The values of `part_fields` that one answer of the engine gives; those left out are null.

        An ``error`` among them makes the row an error row with this reason.

        Args:
            completion: one without an error.
            decode: token ids to text.
        """
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
    insert_statement: ClassVar[str] = "write/insert_answers"
    instructions: ClassVar[str] = ""
