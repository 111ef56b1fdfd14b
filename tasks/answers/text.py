"""``mode = "generate"``: an answer is a text that the model generates."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import pydantic
from pydantic import AfterValidator, StrictFloat, StrictInt
from pydantic.dataclasses import dataclass

from engine.completion import Completion
from engine.penalties import Penalties
from engine.request import Request
from tasks.answers.grammar_source import GrammarSource, SchemaText, check_pattern, constrained_answer
from tasks.answers.kind import EncodeLabels, PlainAnswer
from tasks.answers.reserved_names import RESERVED_COLUMNS
from tasks.answers.toml_value import CONFIG, Name, Output, Texts, must, refuse_if

_LATER = {"pattern": "", "schema": "", "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Settings that came later, and their defaults."""


@dataclass(frozen=True, slots=True, kw_only=True, config=CONFIG)
class Decoding:
    """How an answer is generated. Names and ranges are those of `engine.Request`. The whole answer matches the regular
    expression `pattern`, or the JSON schema, for which the workload's file names a file; both are empty for none."""

    max_new_tokens: StrictInt = 64
    temperature: StrictFloat = 0.0
    top_k: StrictInt = 0
    top_p: StrictFloat = 1.0
    seed: StrictInt = 0
    repetition_penalty: StrictFloat = 1.0
    presence_penalty: StrictFloat = 0.0
    frequency_penalty: StrictFloat = 0.0
    stop: Texts = ()
    pattern: Annotated[str, AfterValidator(check_pattern)] = ""
    schema: SchemaText = ""

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        Request(request_id="every row", token_ids=np.zeros(1, np.int32), **self.settings)
        refuse_if(self.pattern and self.schema, "pattern and schema exclude each other")
        refuse_if(self.has_grammar and self.stop, "stop needs free text: the pattern or schema says how an answer ends")
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """Parameters of `engine.Request`."""
        settings = {name: value for name, value in asdict(self).items() if name not in ("pattern", "schema")}
        penalties = {name: settings.pop(f"{name}_penalty") for name in ("repetition", "presence", "frequency")}
        if any(value != _LATER[f"{name}_penalty"] for name, value in penalties.items()):
            settings["penalties"] = Penalties(**penalties)
        return settings

    @property
    def digest_parts(self) -> dict[str, Any]:
        """The settings that decide an answer. Those which earlier versions did not have count if they are set."""
        return {name: value for name, value in asdict(self).items() if value != _LATER.get(name)}

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar constrains the answers."""
        return bool(self.pattern or self.schema)


@dataclass(frozen=True, slots=True, kw_only=True, config=CONFIG)
class TextOutput(Output):
    """The table ``[output]`` of texts; `answer_column` is the column of the output table that holds the text."""

    answer_column: Annotated[
        Name,
        must(str.strip, "must not be empty"),
        must(lambda own: own.lower() not in RESERVED_COLUMNS, "may not be {!r}, a column that batchloom writes itself"),
    ]


@dataclass(frozen=True, slots=True, kw_only=True, config=CONFIG)
class TextAnswer(PlainAnswer):
    """A generated text."""

    mode: ClassVar[str] = "generate"
    is_decoded: ClassVar[bool] = True
    rank_within: ClassVar[str] = ""

    decoding: Decoding = Decoding()
    output: TextOutput

    @property
    def digest_parts(self) -> list[Any]:
        return [self.decoding.digest_parts, []]

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
        settings = self.decoding.settings
        if self.decoding.has_grammar:
            syntax: Literal["pattern", "schema"] = "pattern" if self.decoding.pattern else "schema"
            settings["grammar"] = GrammarSource(syntax, self.decoding.pattern or self.decoding.schema)
        return [settings | {"mode": "generate", "expected_output_tokens": expected_output_tokens}]

    def read(self, completion: Completion, decode: Callable[[Sequence[int]], str]) -> Mapping[str, Any]:
        if self.decoding.has_grammar:
            return constrained_answer(completion, decode)
        token_ids, reason = [int(token) for token in completion.token_ids], completion.finish_reason
        text = decode(token_ids[:-1] if reason == "eos" else token_ids)  # not all end tokens are special
        text = text.rstrip("\ufffd" if reason == "length" else "")  # a cut character
        ends = [end for end in map(text.find, self.decoding.stop) if end >= 0]
        return {"answer": text[: min(ends, default=len(text))].strip(), "token_ids": token_ids}
