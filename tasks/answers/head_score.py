"""``mode = "score"`` with ``labels = "checkpoint"``: the model's classification head, as rerankers have, decides."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic.dataclasses import dataclass
from tokenizers import Tokenizer

from engine.errors import ModelError, WorkloadError
from engine.pooling.class_labels import ClassLabels
from tasks.answers.kind import EncodeLabels, PooledKind, TooLong
from tasks.answers.score import ScoreKind, ScoreOutput
from tasks.answers.toml_value import CONFIG, Texts

PAIR_MARK = "\x1f"
"""Separates the two texts of a pair in a template, until `bind` replaces it by the model's separator."""


@dataclass(frozen=True, slots=True, kw_only=True, config=CONFIG)
class HeadScore(ScoreKind, PooledKind):
    """A choice of the classification head; the score is the probability of one class.

    Attributes:
        labels: the head's classes, in order; `bind` reads them.
        score_label: the class whose probability is the score; empty for the first.
        pair: template of the second text of a pair; empty for one text. `bind` sets it to the pair's separator.
        too_long: see `TooLong`; of a pair, the longer text is cut.
    """

    labels: Literal["checkpoint"] | Texts
    score_label: str = ""
    pair: str = ""
    too_long: TooLong = "truncate"
    output: ScoreOutput

    def join(self, template: str) -> str:
        """See `AnswerKind.join`: appends the second text to the first."""
        return template + PAIR_MARK + self.pair if self.pair else template

    def bind(self, template: str, checkpoint: Path) -> tuple[Self, str]:
        """See `AnswerKind.bind`: reads the head's labels, and the separator between the texts of a pair."""
        names = ClassLabels.read(checkpoint).names
        if self.score_label and self.score_label not in names:
            raise WorkloadError(f"score_label is {self.score_label!r}, which the model does not have; it has {names}")
        pair = self.pair
        if PAIR_MARK in template:
            pair = find_pair_separator(checkpoint)
            template = template.replace(PAIR_MARK, pair.replace("{", "{{").replace("}", "}}"))
        return replace(self, labels=names, score_label=self.score_label or names[0], pair=pair), template

    @property
    def pair_separator(self) -> str:
        return self.pair

    @property
    def digest_parts(self) -> list[Any]:
        return [self.labels, self.score_label, self.too_long]

    @property
    def score_labels(self) -> tuple[str, ...]:
        return () if isinstance(self.labels, str) else self.labels

    @property
    def score_index(self) -> int:  # type: ignore[override]
        return self.score_labels.index(self.score_label)

    def ask(self, encode_labels: EncodeLabels, expected_output_tokens: int | None) -> Sequence[Mapping[str, Any]]:
        separator = encode_labels([self.pair], "")[0][0] if self.pair else None
        return [{"mode": "classify", "pair_separator": separator}]


def find_pair_separator(checkpoint: Path) -> str:
    """The control tokens that a checkpoint's tokenizer puts between the two texts of a pair. Raises `ModelError` if
    there are none, or the pair is encoded in another way than one text with the separator in it."""
    path = checkpoint / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises plain Exception
        raise ModelError(f"{path} cannot be read: {error}") from error
    first, second = "the first text", "The second: text"
    pair = tokenizer.encode(first, second)
    places = pair.sequence_ids
    separator = "".join(pair.tokens[len(places) - places[::-1].index(0) : places.index(1)])
    joined = tokenizer.encode(first + separator + second)
    if not separator or joined.ids != pair.ids:
        raise ModelError(f"{path}: the tokenizer has no form for a pair of texts that is supported")
    return separator
