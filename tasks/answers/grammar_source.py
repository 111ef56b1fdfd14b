"""Answers constrained by a grammar: reading the grammar from a workload's file, and reading such answers."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ValidationInfo

from engine.completion import Completion
from engine.errors import GrammarError
from tasks.answers.toml_value import refuse_if


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """The text of a grammar. It takes the place of `engine.Grammar` in a request until the model is known. `opening` is
    empty without a tokenizer, so forecasts count its tokens as decoded."""

    opening: ClassVar[tuple[int, ...]] = ()

    syntax: Literal["pattern", "schema", "lark"]
    text: str

    def check(self) -> None:
        """Raise `ValueError` if the text has a syntax error, allows no answer, or is a pattern that grows too large."""
        from engine.grammar_check import check_source  # imported only when needed

        try:
            check_source(self.syntax, self.text)
        except GrammarError as error:
            raise ValueError(str(error)) from error


def check_pattern(pattern: str) -> str:
    """The pattern; `ValueError` if it is no regular expression, or nothing matches it."""
    if pattern:
        try:
            GrammarSource("pattern", pattern).check()
        except ValueError as error:
            raise ValueError(f"cannot be used: {error}") from error
    return pattern


def _read_schema(name: str, info: ValidationInfo) -> str:
    if not name or info.context is None:  # a copy of a workload already holds the text
        return name
    path = Path(str(info.context)) / name
    try:
        schema = json.loads(path.read_text(encoding="utf-8-sig"))
        text = json.dumps(schema, ensure_ascii=False)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"names {name!r}, and {str(path)!r} cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"names {name!r}, which is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"names {name!r}, which is nested too deeply") from error
    refuse_if(not isinstance(schema, dict), f"names {name!r}, which is not a JSON object")
    try:
        GrammarSource("schema", text).check()
    except ValueError as error:
        raise ValueError(f"names {name!r}, which cannot be used: {error}") from error
    return text


SchemaText = Annotated[str, AfterValidator(_read_schema)]
"""A file's name in the TOML; once validated, the schema itself on one line."""


def constrained_answer(completion: Completion, decode: Callable[[Sequence[int]], str]) -> Mapping[str, Any]:
    """See `AnswerKind.read`; a truncated answer is an error."""
    token_ids = [int(token) for token in completion.token_ids]
    if completion.finish_reason == "length":
        return {"error": f"the answer is not complete after max_new_tokens = {len(token_ids)} tokens"}
    said = token_ids[:-1] if completion.finish_reason == "eos" else token_ids  # not all end tokens are special
    text, twice = decode(said), decode(2 * said)  # some decoders drop a space, but only the first one
    return {"answer": twice[len(text) :], "token_ids": token_ids}
