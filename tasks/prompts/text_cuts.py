"""Exact cuts: places where a text can be cut so that the token ids of its pieces, joined, are those of the whole text.

For two kinds of BPE tokenizer, the characters on both sides tell whether any stage of the tokenizer looks across a cut:

words: byte-level BPE with a word pattern like GPT-2's, Llama 3's or Qwen's. In every known alternative of such a
    pattern (see `word_patterns`) a word ends between an ASCII letter and a blank or one of `MARKS`.
spaces: BPE without words that writes blanks as "▁". A cut before a blank that follows a letter is exact if no piece
    of the vocabulary has a "▁" behind a letter. If the tokenizer prepends a "▁" to a text, the piece is encoded
    without its own blank.

No cut lies inside white space or inside an added token. Other tokenizers (Unigram, WordPiece) have no cuts.
"""

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.prompts.word_patterns import is_word_pattern

MARKS = ' \t\n\r:,.;?!()[]{}<>"'
"""Characters that may follow a cut between words; none that a pattern joins to a word, such as an apostrophe."""

_LETTERS = string.ascii_letters
_UNICODE_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
_SPACE = "▁"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCuts:
    """The exact cuts of one tokenizer.

    Attributes:
        pairs: a letter followed by another character; between the two is an exact cut.
        drops_space: the tokenizer prepends a blank to a text, so a piece after a cut is encoded without its own blank.
        added: added tokens. The tokenizer prepends a blank to the text behind one, and none to a token.
    """

    pairs: frozenset[str]
    drops_space: bool
    added: tuple[str, ...]

    def last(self, text: str, start: int, end: int) -> int:
        """The position of the last exact cut of `text` from `start` to `end`, both included; at least 1, or -1 if there
        is none. See `find_cuts`."""
        end = min(end, len(text) - (2 if self.drops_space else 1))
        for position in range(end, max(start, 1) - 1, -1):
            if text[position - 1 : position + 1] in self.pairs and not (
                self.drops_space and self._is_beside_added(text, position)
            ):
                return position
        return -1

    def _is_beside_added(self, text: str, position: int) -> bool:
        """Whether an added token ends at a blank, begins with it, or follows it."""
        starts = any(text.startswith(self.added, start) for start in (position, position + 1))
        return starts or text.endswith(self.added, 0, position)

    def behind(self, piece: str) -> str:
        """The text to encode for a piece that follows a cut."""
        return piece[1:] if self.drops_space else piece


def find_cuts(spec: Mapping[str, Any], names: Mapping[str, str]) -> TextCuts | None:
    """The exact cuts of a tokenizer, given as JSON; None if its pipeline is not known to have any. `names` maps the
    content of an added token in it to its name in the texts."""
    added = [names.get(token["content"], token["content"]) for token in spec["added_tokens"]]
    # Both options make a match depend on the characters around the token.
    if any(token["single_word"] or token["rstrip"] for token in spec["added_tokens"]):
        return None
    if spec["model"]["type"] != "BPE" or spec["model"].get("dropout"):
        return None
    if _has_words(spec):
        return _cuts(MARKS, added, drops_space=False)
    if _has_spaces(spec):
        prepends = any(step["type"] == "Prepend" for step in _steps(spec["normalizer"]))
        return _cuts(" ", added, drops_space=prepends)
    return None


def _cuts(marks: str, added: list[str], *, drops_space: bool) -> TextCuts | None:
    """All pairs except those inside of an added token: a cut could split the token."""
    pairs = {letter + mark for letter in _LETTERS for mark in marks}
    pairs -= {text[i : i + 2] for text in added for i in range(len(text) - 1)}
    return TextCuts(pairs=frozenset(pairs), drops_space=drops_space, added=tuple(added)) if pairs else None


def _has_words(spec: Mapping[str, Any]) -> bool:
    if any(step["type"] not in _UNICODE_FORMS for step in _steps(spec["normalizer"])):
        return False
    steps = _steps(spec["pre_tokenizer"])
    if any(step["type"] == "ByteLevel" for step in steps[:-1]):  # the next step sees letters that stand for bytes
        return False
    return any(map(_splits_words, steps)) and all(_splits_words(step) or _is_harmless(step) for step in steps)


def _splits_words(step: Mapping[str, Any]) -> bool:
    if step["type"] == "ByteLevel":  # GPT-2's pattern
        return bool(step["use_regex"]) and not step["add_prefix_space"]
    if step["type"] != "Split" or step["behavior"] != "Isolated" or step["invert"]:
        return False
    return is_word_pattern(step["pattern"].get("Regex", ""))


def _is_harmless(step: Mapping[str, Any]) -> bool:
    """Whether a step of the pre-tokenizer splits off digits only, or leaves words as they are."""
    if step["type"] == "ByteLevel":
        return not step["use_regex"] and not step["add_prefix_space"]
    if step["type"] == "Split":
        is_digits = step["pattern"].get("Regex") in (r"\p{N}", r"\p{N}{1,3}", r"\d", r"[0-9]")
        return is_digits and step["behavior"] == "Isolated" and not step["invert"]
    return bool(step["type"] == "Digits")


def _has_spaces(spec: Mapping[str, Any]) -> bool:
    model = spec["model"]
    if any(model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")):
        return False
    pieces = model["vocab"]
    if not {_SPACE, *_LETTERS} <= pieces.keys():
        return False
    if any(before and before[-1] in _LETTERS for piece in pieces for before in piece.split(_SPACE)[:-1]):
        return False
    normalizer, pre_tokenizer = _steps(spec["normalizer"]), _steps(spec["pre_tokenizer"])
    to_space = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    if not pre_tokenizer:
        return normalizer in ([to_space], [{"type": "Prepend", "prepend": _SPACE}, to_space])
    (first, *rest) = pre_tokenizer
    return not normalizer and not rest and (first["type"], first.get("replacement")) == ("Metaspace", _SPACE)


def _steps(part: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer, with nested sequences flattened."""
    if part is None:
        return []
    nested = part.get("normalizers", part.get("pretokenizers"))
    return [dict(part)] if nested is None else [step for inner in nested for step in _steps(inner)]
