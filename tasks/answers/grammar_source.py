"""Answers that are held to a grammar: what a workload's file says of it, and what is read of an answer."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ValidationInfo

from engine.errors import GrammarError
from engine.request import Completion
from tasks.answers.toml_value import refuse_if


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """Which answers are allowed; stands for `engine.Grammar` in a request until the model is known.

    Attributes:
        syntax: of the text: a regular expression, a JSON schema, or a context-free grammar.
        text: see `engine.grammar.Grammar`.
        opening: see `engine.grammar.Grammar`; not known without a tokenizer, so forecasts count its tokens as decoded.
    """

    opening: ClassVar[tuple[int, ...]] = ()

    syntax: Literal["pattern", "schema", "lark"]
    text: str

    def check(self) -> None:
        """Raise `ValueError` where no answer is allowed, a pattern explodes, or the text is not of its syntax."""
        from engine.grammar_check import check_source  # most workloads have no grammar

        try:
            check_source(self.syntax, self.text)
        except GrammarError as error:
            raise ValueError(str(error)) from error


def check_pattern(pattern: str) -> str:
    """The pattern; `ValueError` where it is none, or nothing matches it."""
    if pattern:
        try:
            GrammarSource("pattern", pattern).check()
        except ValueError as error:
            raise ValueError(f"cannot be used: {error}") from error
    return pattern


def _read_schema(name: str, info: ValidationInfo) -> str:
    if not name or info.context is None:  # a copy of a workload, which has the text already
        return name
    path = Path(str(info.context)) / name
    try:
        schema = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"names {name!r}, and {path} cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"names {name!r}, which is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"names {name!r}, which is nested too deeply") from error
    refuse_if(not isinstance(schema, dict), f"names {name!r}, which is not a JSON object")
    text = json.dumps(schema, ensure_ascii=False)
    try:
        GrammarSource("schema", text).check()
    except ValueError as error:
        raise ValueError(f"names {name!r}, which cannot be used: {error}") from error
    return text


SchemaText = Annotated[str, AfterValidator(_read_schema)]
"""In the file a name; then the schema itself, on one line."""


def constrained_answer(completion: Completion, decode: Callable[[Sequence[int]], str]) -> Mapping[str, Any]:
    """See `AnswerKind.read`; an answer that is cut is no answer."""
    token_ids = [int(token) for token in completion.token_ids]
    if completion.finish_reason == "length":
        return {"error": f"the answer is not complete after max_new_tokens = {len(token_ids)} tokens"}
    return {"answer": decode(token_ids), "token_ids": token_ids}
