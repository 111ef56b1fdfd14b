"""Prompts that are too long: what is cut off them."""

import logging
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.encoding.families import find_longest_text, is_encoder
from engine.pooling.sentence_files import read_sentence_files
from tasks.answers.kind import AnswerKind, PooledKind
from tasks.prompts.prompt import SUFFIX, Encode, Tokens, workload_format
from tasks.prompts.prompt_pieces import special_tokens
from tasks.prompts.text_codec import TextCodec
from tasks.workloads.workload import Prompt

LOGGER = logging.getLogger("batchloom")


def cut_prompts(encode: Encode, column: str, suffixes: Sequence[str], limit: int) -> Encode:
    """`encode`, but a row whose prompt would have more than `limit` tokens loses so much of the end of a column's text
    that it fits; all requests of a row keep the same text. A prompt that fits only without that text stays as it is.

    Args:
        suffixes: of the requests that each row makes; see `AnswerKind.suffixes`.
    """
    most_suffix_tokens = max(len(suffix.encode()) for suffix in suffixes)
    announce = cache(LOGGER.info)  # once a table

    @lru_cache(maxsize=1)  # the requests of a row follow each other
    def find_text(row: frozenset[tuple[str, str]]) -> str:
        values = dict(row)
        text = values[column]

        def is_too_long(num_characters: int) -> bool:
            values[column] = text[:num_characters]
            return max(map(len, encode([values | {SUFFIX: suffix} for suffix in suffixes]))) > limit

        if not is_too_long(len(text)):
            return text
        kept = text[: max(bisect_left(range(len(text)), True, key=is_too_long) - 1, 0)]
        if not kept.strip():
            return text
        announce("prompts of more than %d tokens lose the end of {%s}", limit, column)
        return kept

    def encode_cut(rows: Sequence[Mapping[str, str]]) -> Iterator[Tokens]:
        for row, prompt in zip(rows, list(encode(rows)), strict=True):
            if len(prompt) > limit - most_suffix_tokens:
                text = find_text(frozenset((name, value) for name, value in row.items() if name != SUFFIX))
                (prompt,) = encode([{**row, column: text}])
            yield prompt

    return encode_cut


def limit_prompts(
    encode: Encode, kind: AnswerKind, prompt: Prompt, codec: TextCodec, checkpoint: Path, max_model_len: int
) -> tuple[int, Encode]:
    """The least limit of a checkpoint's config.json and its tokenizer. For embeddings, a limit of its
    sentence-transformers files takes the place of the tokenizer's.

    Args:
        kind: of the answers; its `too_long` decides between cutting and errors.
        prompt: of the workload. The chat template around a text, and the text behind its last column, stay.
        max_model_len: most tokens, by config.json or a setting.
    Returns:
        most tokens of a prompt, special ones included, and `encode` with longer prompts cut; `encode` itself if they
            are errors.
    Raises:
        ModelError: a file of the checkpoint cannot be read.
    """
    assert isinstance(kind, PooledKind), "other kinds have no such limit"
    most, side = codec.truncation
    if kind.mode == "embed":
        most = read_sentence_files(checkpoint).max_tokens or most
    limits = [max_model_len, most]
    if is_encoder(checkpoint):
        limits.append(find_longest_text(checkpoint))
    limit = min(each for each in limits if each)
    if kind.too_long == "error":
        return limit, encode
    between = kind.pair_separator
    separator = np.array(codec.encode([codec.trust(between)], add_special_tokens=False)[0] if between else [])
    form = workload_format(prompt, kind.thinking, codec)
    chat = codec.encode([form.head, form.ending()[0]], add_special_tokens=False)
    num_before, num_after = map(len, special_tokens(codec) if form.is_plain else chat)
    return limit, lambda rows: (_cut(tokens, limit, num_before, num_after, separator, side) for tokens in encode(rows))


def _cut(
    prompt: Tokens, limit: int, num_before: int, num_after: int, separator: npt.NDArray[np.int64], side: str
) -> Tokens:
    """The prompt with its text, or the two texts of a pair, cut to `limit` tokens at their end, or at their beginning
    if the side is "left"; the tokens around the texts, `num_before` and `num_after`, and the separator between them
    (empty if there is one text) stay, even if they are too many."""
    if len(prompt) <= limit:
        return prompt
    middle = end = len(prompt) - num_after
    if len(separator):
        middle = num_before + int(np.flatnonzero(prompt[num_before:end] == separator[0])[0])
    texts = prompt[num_before:middle], prompt[middle + len(separator) : end]
    room = limit - num_before - len(separator) - num_after
    num_kept = share_tokens(len(texts[0]), len(texts[1]), room)
    first, second = (
        text[len(text) - kept :] if side == "left" else text[:kept] for text, kept in zip(texts, num_kept, strict=True)
    )
    between = prompt[middle : middle + len(separator)]
    return np.concatenate([prompt[:num_before], first, between, second, prompt[end:]])


def share_tokens(num_first: int, num_second: int, limit: int) -> tuple[int, int]:
    """How many tokens of each text of a pair stay: the longer one is cut to the shorter one's length, then both.

    Args:
        limit: most tokens of both together.
    """
    shorter = min(num_first, num_second)
    kept = min(shorter, limit // 2), max(limit - limit // 2, limit - shorter)
    return kept if num_first <= num_second else kept[::-1]
