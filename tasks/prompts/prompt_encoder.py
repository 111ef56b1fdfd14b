"""Prompts to token ids. Prompts are cut where a cut changes no ids, so that a piece of many prompts is encoded once."""

import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tasks.prompts.prompt import PromptFormat
from tasks.prompts.text_codec import TextCodec

Tokens = npt.NDArray[np.int32]

KEPT_TOKENS = 4_000_000
"""Most tokens in the pieces that are remembered; older pieces are forgotten. With their text about 50 MB."""

CUT_WINDOW = 256
"""Characters before a field in which a cut is looked for."""

CHECKED_ROWS = 64
"""Prompts of the first batch that are tokenized both ways."""


class PromptEncoder:
    """Encodes prompts of one form; it remembers pieces, so use one for a whole table, from one thread."""

    __slots__ = ("_codec", "_cuts", "_form", "_is_checked", "_known", "_num_known_tokens")

    def __init__(self, form: PromptFormat, codec: TextCodec) -> None:
        self._form = form
        self._codec = codec
        self._cuts = codec.cuts
        self._is_checked = False
        self._known: dict[tuple[str, bool], Tokens] = {}  # oldest first, by text and whether it stands behind a cut
        self._num_known_tokens = 0

    def encode(self, rows: Sequence[Mapping[str, str]]) -> list[Tokens]:
        """Token ids of each row's prompt, exactly as `TextCodec.encode` has them for the whole text.

        A prompt is cut near the start of each field that comes from a column, so that an instruction is one piece, and
        so is a document with the words around it. The first prompts are checked against whole ones; where one differs,
        none is cut from then on.

        Args:
            rows: values of the form's columns.
        """
        placed = [self._form.place(row) for row in rows]
        if self._cuts is None:
            return self._encode_whole([text for text, _ in placed])
        if not self._is_checked and placed:
            first = placed[:CHECKED_ROWS]
            whole = self._encode_whole([text for text, _ in first])
            if not all(map(np.array_equal, whole, self._encode_pieces(first))):
                self._cuts = None
                return self.encode(rows)
            self._is_checked = True
        return self._encode_pieces(placed)

    def _encode_whole(self, texts: Sequence[str]) -> list[Tokens]:
        ids = self._codec.encode(texts, add_special_tokens=self._form.add_special_tokens)
        return [_as_array(tokens) for tokens in ids]

    def _encode_pieces(self, placed: Sequence[tuple[str, Sequence[int]]]) -> list[Tokens]:
        pieces_of = [self._cut(text, starts) for text, starts in placed]
        new = dict.fromkeys(piece for pieces in pieces_of for piece in pieces if piece not in self._known)
        texts = [self._cuts.behind(text) if is_behind and self._cuts else text for text, is_behind in new]
        encoded = self._codec.encode(texts, add_special_tokens=False)
        self._known.update(zip(new, map(_as_array, encoded), strict=True))
        self._num_known_tokens += sum(map(len, encoded))
        before, after = self._codec.special_tokens if self._form.add_special_tokens else ((), ())
        edges = (np.array(before, np.int32), np.array(after, np.int32))
        prompts = [
            np.concatenate([edges[0], *(self._known[piece] for piece in pieces), edges[1]]) for pieces in pieces_of
        ]
        while self._num_known_tokens > KEPT_TOKENS:
            self._num_known_tokens -= len(self._known.pop(next(iter(self._known))))
        return prompts

    def _cut(self, text: str, field_starts: Sequence[int]) -> list[tuple[str, bool]]:
        """The pieces of a prompt, and whether each stands behind a cut."""
        cuts = [0]
        for start in field_starts:
            cut = self._cuts.last(text, max(cuts[-1] + 1, start - CUT_WINDOW), start) if self._cuts else -1
            if cut > 0:
                cuts.append(cut)
        return [(text[start:end], start > 0) for start, end in pairwise([*cuts, len(text)])]


def _as_array(token_ids: Sequence[int]) -> Tokens:
    return np.frombuffer(struct.pack(f"{len(token_ids)}i", *token_ids), dtype=np.int32)
