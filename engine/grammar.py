"""Grammars that constrain answers, and the state of one answer in its grammar (llguidance).

A state of the grammar determines which tokens may come next. Text that is the only possible continuation is *forced*.
The model's tokenizer turns forced text into tokens, and those that do not depend on the text after them are taken
without sampling. The last letters of a forced text may be part of a token with the text that follows, so the
model chooses that token, among all tokens that begin with these letters.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from collections.abc import Sequence as Sequences
from copy import copy
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par

from engine.errors import GrammarError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

_YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][48]|[13579][26]|[2468]0)00)"
DAY = (
    rf"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    rf"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
"""A regular expression for the dates of the calendar, from 0001-01-01 on."""

_NAMES = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords of a JSON schema whose value maps names to schemas."""

JSON_OPTIONS: "JsonCompileOptions" = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as Python's ``json.dumps`` writes it: the form most common in training data, with one spelling of each key."""


class Vocabulary:
    """A model's tokens as text. It takes about a second to make, and all grammars for a model share it.

    Args:
        tokenizer: of the model; a fast (Rust) tokenizer.
        vocab_size: rows of the model's output layer; those without a token are never allowed.
        eos_token_ids: tokens that end an answer, at least one.
    """

    def __init__(
        self, tokenizer: "Tokenizer | PreTrainedTokenizerFast", *, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        if not eos_token_ids:
            raise GrammarError("the model has no end-of-sequence token, and answers of a grammar end with one")
        self.size = vocab_size
        try:
            self.eos_token_ids = frozenset(eos_token_ids)
            spec = json.loads(getattr(tokenizer, "backend_tokenizer", tokenizer).to_str())
            text = json.dumps({**spec, "truncation": None, "padding": None})
            self._plain = LLTokenizer(text, n_vocab=vocab_size, eos_token=sorted(eos_token_ids))
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise GrammarError(f"no grammars with this tokenizer, vocab_size and eos_token_ids: {error}") from error
        self._json = self._plain.with_slices(LLTokenizer.json_slices())
        self._executor: LLExecutor | None = None

    def compile(self, source: str, *, is_json: bool) -> LLMatcher:
        """A matcher of llguidance's source, in an error state where it is not valid; `is_json`: for strings in JSON."""
        return LLMatcher(self._json if is_json else self._plain, source, log_level=0)

    def fill_masks(self, matchers: list[tuple[LLMatcher, int]], masks: npt.NDArray[np.int32]) -> None:
        """Writes the masks of allowed next tokens, with several threads.

        Args:
            matchers: each with its row of `masks`.
            masks: ``[n, ceil(size / 32)]``; bit t % 32 of word t // 32 is set where token t is allowed.
        """
        if self._executor is None:
            self._executor = LLExecutor()
        fill_next_token_bitmask_par(self._executor, matchers, masks)


class Grammar:
    """The set of answers that a request may have. Grammars with the same vocabulary and source are equal. Made by
    `from_pattern`, `from_json_schema` or `from_lark`; `opening` has the tokens that every answer begins with."""

    def __init__(self, source: str, vocabulary: Vocabulary, *, is_json: bool = False) -> None:
        """Compiles `source`, llguidance's own form, of JSON if `is_json`; `GrammarError` if it is not valid, allows no
        answer, or is too large."""
        if not isinstance(vocabulary, Vocabulary):
            raise GrammarError(f"vocabulary must be a Vocabulary, got {vocabulary!r}")
        self.vocabulary = vocabulary
        self._source = source
        self._is_json = is_json
        self._first = check_begin(vocabulary.compile(source, is_json=is_json))
        self.opening = tuple(self._first.compute_ff_tokens())

    @classmethod
    def from_pattern(cls, pattern: str, vocabulary: Vocabulary) -> "Grammar":
        """Answers that match a regular expression, without look-around and back references. Raises as `Grammar`."""
        return cls(text_source("pattern", pattern), vocabulary)

    @classmethod
    def from_json_schema(cls, schema: Mapping[str, Any] | str, vocabulary: Vocabulary) -> "Grammar":
        """JSON on one line that a JSON schema allows, properties in the schema's order. A keyword that is not
        implemented is refused; a word that JSON Schema does not know is ignored. Raises as `Grammar`."""
        return cls(json_source(schema), vocabulary, is_json=True)

    @classmethod
    def from_lark(cls, text: str, vocabulary: Vocabulary) -> "Grammar":
        """Answers of a context-free grammar in llguidance's dialect of Lark. Raises as `Grammar`."""
        return cls(text_source("lark", text), vocabulary)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grammar) and (self._source, self.vocabulary) == (other._source, other.vocabulary)

    def __hash__(self) -> int:
        return hash((self._source, self.vocabulary))

    def new_matcher(self) -> LLMatcher:
        """A matcher at the start of an answer; all matchers share the grammar's states that any of them has reached."""
        return self._first.deep_copy()

    def renew(self) -> LLMatcher:
        """As `new_matcher`; it and later ones share no states with those made before."""
        self._first = self.vocabulary.compile(self._source, is_json=self._is_json)
        return self.new_matcher()


def text_source(syntax: Literal["pattern", "lark"], text: str) -> str:
    """llguidance's form of a regular expression, or of Lark's syntax. Raises `GrammarError` if it is no text."""
    if not isinstance(text, str) or re.search("[\ud800-\udfff]", text):
        raise GrammarError(f"{syntax} must be a string without lone surrogates, got {text!r}")
    return LLMatcher.grammar_from_regex(text) if syntax == "pattern" else LLMatcher.grammar_from_lark(text)


def json_source(schema: Mapping[str, Any] | str) -> str:
    """llguidance's form of a JSON schema. Raises `GrammarError` if it is not JSON, or nested too deeply."""
    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        return LLMatcher.grammar_from_json_schema(json.dumps(_with_calendar(schema)), overrides=JSON_OPTIONS)
    except (ValueError, TypeError) as error:
        raise GrammarError(f"the JSON schema is not JSON: {error}") from error
    except RecursionError as error:
        raise GrammarError("the JSON schema is nested too deeply") from error


def _with_calendar(schema: Any, *, is_names: bool = False) -> Any:
    """The schema with valid calendar dates only; llguidance's formats allow any 29 February and the year 0000. With
    `is_names`, the keys are property names, not keywords of the schema."""
    if isinstance(schema, list):
        return [_with_calendar(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    held = {
        key: value
        if key in ("const", "enum", "default", "examples") and not is_names
        else _with_calendar(value, is_names=not is_names and key in _NAMES)
        for key, value in schema.items()
    }
    if not is_names and held.get("format") in ("date", "date-time"):
        held["allOf"] = [*held.get("allOf", ()), {"pattern": f"^{DAY}"}]
    return held


def check_begin(matcher: LLMatcher) -> LLMatcher:
    """Checks the first matcher of a grammar, and its first mask, which shows errors that compilation does not."""
    if matcher.is_error():
        raise GrammarError(_first_line(matcher.get_error()))
    is_allowed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8).any()
    if matcher.is_error() or not is_allowed or (matcher.is_stopped() and not matcher.is_accepting()):
        raise GrammarError(f"the grammar allows no answer: {_first_line(matcher.get_error()) or matcher.stop_reason()}")
    return matcher


def _first_line(message: str) -> str:
    """llguidance's error message without the lines that quote its generated source."""
    lines = [line.strip() for line in message.split("<state>")[0].splitlines()]
    kept = [line for line in lines if line and not re.match(r"[|^]|\d+ \|", line)]
    return re.sub(r"^at \d+\(\d+\): ", "", " ".join(kept))[:300]


class Constraint:
    """The state of one answer in its grammar.

    Args:
        known: tokens of the grammar's opening that the answer has already.
    Attributes:
        forced: the next tokens where they are forced; where the answer is complete, its end-of-sequence token.
        has_ended: whether the answer has its end-of-sequence token.
        matcher: llguidance's state of the answer.
    """

    __slots__ = ("_accepted", "_grammar", "forced", "has_ended", "matcher", "vocabulary")

    def __init__(self, grammar: Grammar, known: Sequences[int]) -> None:
        self._grammar, self.vocabulary = grammar, grammar.vocabulary
        self.matcher = grammar.new_matcher()
        self._accepted: list[int] = []
        self.has_ended = False
        self.forced: list[int] = []
        self._look_ahead()
        for token_id in known:
            self.accept(token_id)

    @property
    def error(self) -> str | None:
        """Why the answer cannot go on, where the grammar's states exceed llguidance's limits; else None."""
        return _first_line(self.matcher.get_error()) if self.matcher.is_error() else None

    @property
    def is_complete(self) -> bool:
        """Whether only an end-of-sequence token may follow."""
        return self.matcher.is_stopped()

    def accept(self, token_id: int) -> None:
        """Appends the next token of the answer, which must be an allowed one."""
        if token_id in self.vocabulary.eos_token_ids:
            self.has_ended = True
            self.forced = []
            return
        self._accepted.append(token_id)
        if not self.matcher.consume_token(token_id):
            self.restart()
        self.forced = self.forced[1:]
        if not self.forced:
            self._look_ahead()

    def take_forced(self, most: int) -> list[int]:
        """Appends forced tokens to the answer, at most `most` of them, and returns them."""
        taken: list[int] = []
        while self.forced and len(taken) < most:
            taken.append(self.forced[0])
            self.accept(self.forced[0])
        return taken

    def count_allowed(self, token_ids: Sequences[int]) -> int:
        """How many of the tokens, from the first on, the answer allows; end-of-sequence tokens are not counted."""
        ends = self.vocabulary.eos_token_ids
        return max(0, self.matcher.validate_tokens([*takewhile(lambda token_id: token_id not in ends, token_ids)]))

    def goes_on(self, token_ids: Sequences[int]) -> Iterator["Constraint"]:
        """Copies ahead by the first allowed next token, by two, and so on, up to one that is not the forced token."""
        later = self
        for token_id in token_ids:
            if later.forced and later.forced[0] != token_id:
                return
            later = copy(later)
            later.matcher, later._accepted = later.matcher.deep_copy(), [*later._accepted]
            later.accept(token_id)
            yield later

    def restart(self) -> None:
        """Continues with new states, where the states shared by all answers have exceeded llguidance's limits."""
        self.matcher = self._grammar.renew()
        self.matcher.consume_tokens(self._accepted)

    def _look_ahead(self) -> None:
        ends = self.vocabulary.eos_token_ids
        self.forced = [*ends] if self.is_complete and len(ends) == 1 else self.matcher.compute_ff_tokens()
        if self.matcher.is_error():
            self.restart()
            self.forced = self.matcher.compute_ff_tokens()
