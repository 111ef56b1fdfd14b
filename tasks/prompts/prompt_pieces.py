"""Encodes prompts of one format in pieces, so that text shared by many prompts, as a document, is encoded once."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from tasks.prompts.prompt import Tokens, encode_texts
from tasks.prompts.text_codec import TextCodec
from tasks.prompts.text_cuts import TextCuts

KEPT_TOKENS = 4_000_000
"""Most tokens of cached pieces; beyond it the oldest are dropped. With their text they take about 50 MB."""

CUT_WINDOW = 256
"""A cut is searched in this many characters before a column's value."""

CHECKED_ROWS = 64
"""Prompts of the first batch that are encoded both whole and in pieces."""

Placed = Sequence[tuple[str, Sequence[int]]]
"""Prompts as `PromptFormat.place` gives them."""


class PromptPieces:
    """Cuts prompts near the start of each column's value: an instruction is one piece, and a document is another. The
    first prompts are also encoded whole; if the tokens of one differ, no prompt is cut any more."""

    def __init__(self, codec: TextCodec, *, add_special_tokens: bool) -> None:
        self._codec = codec
        self._add_special_tokens = add_special_tokens
        self._cuts = codec.cuts
        self._is_checked = False
        self._known: dict[tuple[str, bool], Tokens] = {}  # by text and whether it follows a cut; oldest first
        self._num_known_tokens = 0

    def encode(self, placed: Placed) -> list[Tokens]:
        """Token ids of each prompt, equal to those of its whole text."""
        if self._cuts and not self._is_checked:
            first = placed[:CHECKED_ROWS]
            if not all(map(np.array_equal, self._encode_whole(first), self._encode_pieces(first, self._cuts))):
                self._cuts = None
            self._is_checked = True
        return self._encode_pieces(placed, self._cuts) if self._cuts else self._encode_whole(placed)

    def _encode_whole(self, placed: Placed) -> list[Tokens]:
        return encode_texts(self._codec, [text for text, _ in placed], self._add_special_tokens)

    def _encode_pieces(self, placed: Placed, cuts: TextCuts) -> list[Tokens]:
        pieces_of = [_cut(text, starts, cuts) for text, starts in placed]
        new = dict.fromkeys(piece for pieces in pieces_of for piece in pieces if piece not in self._known)
        texts = [cuts.behind(text) if is_behind else text for text, is_behind in new]
        encoded = encode_texts(self._codec, texts, add_special_tokens=False)
        self._known.update(zip(new, encoded, strict=True))
        self._num_known_tokens += sum(map(len, encoded))
        edges = special_tokens(self._codec) if self._add_special_tokens else ((), ())
        before, after = (np.array(edge, np.int32) for edge in edges)
        prompts = [np.concatenate([before, *(self._known[piece] for piece in pieces), after]) for pieces in pieces_of]
        while self._num_known_tokens > KEPT_TOKENS:
            self._num_known_tokens -= len(self._known.pop(next(iter(self._known))))
        return prompts


def special_tokens(codec: TextCodec) -> tuple[list[int], list[int]]:
    """Ids that ``add_special_tokens`` puts before a text and after it."""
    (around,), (text,) = (codec.encode(["a"], add_special_tokens=is_whole) for is_whole in (True, False))
    start = next(start for start in range(len(around)) if around[start : start + len(text)] == text)
    return around[:start], around[start + len(text) :]


def _cut(text: str, field_starts: Sequence[int], cuts: TextCuts) -> list[tuple[str, bool]]:
    """The pieces of a prompt, and whether each follows a cut."""
    places = [0]
    for start in field_starts:
        place = cuts.last(text, max(places[-1] + 1, start - CUT_WINDOW), start)
        if place > 0:
            places.append(place)
    return [(text[start:end], start > 0) for start, end in pairwise([*places, len(text)])]
