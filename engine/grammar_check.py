"""Checks of a grammar without a model: refused are one that allows no answer, and a pattern that explodes.

A pattern such as ``(?:.*a.{60}){3}`` compiles at once. Its states are made during matching, each more expensive than
the last, until one token of an answer exceeds llguidance's limits and the answer is lost. `check_source` finds such
patterns by matching answers of the pattern's own letters, also of one letter repeated, with a vocabulary of all short
words of these letters. This vocabulary is smaller than a model's, so the limit on the work of a token is lower here.
"""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from engine.errors import GrammarError
from engine.grammar import check_begin, json_source, text_source

COMMON_LETTERS = "a0 "
"""Letters that classes such as ``\\w``, ``.`` and ``[^,]`` match, where a pattern names few letters."""
NUM_LETTERS = 5
MAX_WORD_LETTERS = 5
MAX_ANSWER_BYTES = 2048
STEP_FUEL = 50_000
"""A quarter of llguidance's own limit on the work of a step."""
SHARE_OF_SAME_LETTER = 0.85


def check_source(syntax: Literal["pattern", "schema", "lark"], text: str) -> None:
    """Raises `GrammarError` for a grammar that is invalid with any vocabulary, allows no answer, or is a pattern that
    explodes. Patterns within a text in Lark's syntax are not checked for explosion."""
    source = json_source(text) if syntax == "schema" else text_source(syntax, text)
    check_begin(LLMatcher(LLTokenizer("byte"), source, log_level=0))
    if syntax == "pattern":
        _check_growth(source, text)
    elif syntax == "schema":
        for string in _find_patterns(json.loads(text)):
            _check_growth(json_source(string), string["pattern"])


def _find_patterns(schema: Any) -> Iterator[dict[str, Any]]:
    """The schemas of strings with a pattern, each reduced to the keys that determine its states."""
    if isinstance(schema, list):
        for each in schema:
            yield from _find_patterns(each)
    elif isinstance(schema, dict):
        if isinstance(schema.get("pattern"), str):
            limits = {key: schema[key] for key in ("pattern", "maxLength") if key in schema}
            yield {"type": "string"} | limits
        for value in schema.values():
            yield from _find_patterns(value)


class _Words:
    """A vocabulary of all bytes and all short words of some letters; its last token is the end of sequence."""

    def __init__(self, letters: list[str]) -> None:
        lengths = range(2, MAX_WORD_LETTERS + 1)
        words = ["".join(word) for length in lengths for word in itertools.product(letters, repeat=length)]
        self.tokens = [*(bytes([value]) for value in range(256)), *(word.encode() for word in words), b"</s>"]
        self.eos_token_id = len(self.tokens) - 1
        self.bos_token_id = None
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _check_growth(source: str, pattern: str) -> None:
    """Matches an answer of random words, and for each letter one that mostly repeats it; `source` is the pattern in
    llguidance's form. Raises `GrammarError` if the states of an answer exceed the limits."""
    spelled = re.findall(r"\w", re.sub(r"\\.|\{[\d,]*\}", "", pattern))
    letters = [*dict.fromkeys([*spelled, *COMMON_LETTERS])][:NUM_LETTERS]
    words = _Words(letters)
    tokenizer = LLTokenizer(TokenizerWrapper(words))
    for number, letter in enumerate(["", *letters]):
        repeats = np.array([bool(letter) and not word.strip(letter.encode()) for word in words.tokens[:-1]])
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(step_lexer_fuel=STEP_FUEL))
        if matcher.is_error():  # not a pattern, but a constant whose key is "pattern"
            return
        rng, answer = np.random.default_rng(number), b""
        while not matcher.is_stopped() and len(answer) < MAX_ANSWER_BYTES:
            mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            is_allowed = mask[: len(repeats)].view(bool)
            if not is_allowed.any():
                break
            is_same = is_allowed & repeats
            is_repeated = rng.random() < SHARE_OF_SAME_LETTER and is_same.any()
            token_id = int(rng.choice(np.flatnonzero(is_same if is_repeated else is_allowed)))
            answer += words.tokens[token_id]
            matcher.consume_token(token_id)
        if matcher.is_error():
            raise GrammarError(
                f"the pattern {pattern!r} explodes: matching {answer.decode(errors='replace')[-20:]!r}, "
                f"{len(answer)} bytes into an answer, takes too much work; what it repeats must not overlap so much"
            )
