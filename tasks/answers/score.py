"""``mode = "score"``: an answer is one of a few labels, with the probability of each. Nothing is decoded."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic.dataclasses import dataclass

from engine.completion import Completion
from tasks.answers.kind import AnswerKind, EncodeLabels, PlainAnswer
from tasks.answers.toml_value import CONFIG, Output, Texts, must, refuse_if

NO_DECODING = {"max_new_tokens": 64, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0, "stop": ()}
"""The place of a generated answer's decoding in `digest_parts`."""


@dataclass(frozen=True, slots=True, kw_only=True, config=CONFIG)
class ScoreOutput(Output):
    """The table ``[output]`` of scores. Rows are ranked by score within the key column `rank_within`, if given."""

    rank_within: str = ""


class ScoreKind(AnswerKind):
    """A choice among labels with the probability of each, made by a language model or by a classification head."""

    __slots__ = ()

    mode: ClassVar[str] = "score"
    has_labels: ClassVar[bool] = True
    max_answer_tokens: ClassVar[int] = 1

    output: ScoreOutput

    @property
    def columns(self) -> Mapping[str, str]:
        return {"score": "double", "rank": "integer", "label": "text", "label_logprobs": "double[]"}

    @property
    def written(self) -> Mapping[str, str]:
        return {name: name for name in self.columns if name != "rank"}

    @property
    def rank_within(self) -> str:
        return self.output.rank_within

    def check(self, key: Sequence[str]) -> None:
        why = f"[output]: rank_within must be one of the key columns {list(key)}, got {self.rank_within!r}"
        refuse_if(self.rank_within not in ("", *key), why)

    def read(self, completion: Completion, decode: Callable[[Sequence[int]], str]) -> Mapping[str, Any]:
        logprobs = [float(logprob) for logprob in completion.label_logprobs]
        best = max(range(len(logprobs)), key=logprobs.__getitem__)
        score = math.exp(logprobs[self.score_index])
        return {"score": score, "label": self.score_labels[best], "label_logprobs": logprobs}


@dataclass(frozen=True, slots=True, kw_only=True, config=CONFIG)
class LabelScore(ScoreKind, PlainAnswer):
    """A choice among labels; the score is the probability of the first."""

    labels: Annotated[
        Texts,
        must(lambda labels: 1 < len(set(labels)) == len(labels), "must hold two or more different strings, got {!r}"),
    ]
    output: ScoreOutput

    @property
    def digest_parts(self) -> list[Any]:
        return [NO_DECODING, self.labels]

    @property
    def score_labels(self) -> tuple[str, ...]:
        return self.labels

    def ask(self, encode_labels: EncodeLabels, expected_output_tokens: int | None) -> Sequence[Mapping[str, Any]]:
        return [{"mode": "score", "labels": encode_labels(self.labels, "")}]
