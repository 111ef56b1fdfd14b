"""The limit of prompts for embeddings and class scores: longer prompts are cut, or become errors."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.encoding.families import find_longest_text, is_encoder
from engine.pooling.sentence_files import read_sentence_files
from tasks.answers.kind import AnswerKind, PooledKind
from tasks.prompts.prompt import Encode, Tokens
from tasks.prompts.prompt_pieces import special_tokens
from tasks.prompts.text_codec import TextCodec


def limit_prompts(
    encode: Encode, kind: AnswerKind, codec: TextCodec, checkpoint: Path, max_model_len: int
) -> tuple[int, Encode]:
    """The least limit of a checkpoint's config.json and its tokenizer. For embeddings, a limit of its
    sentence-transformers files takes the place of the tokenizer's.

    Args:
        kind: of the answers; its `too_long` decides between cutting and errors.
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
    num_before, num_after = map(len, special_tokens(codec))
    return limit, lambda rows: (_cut(prompt, limit, num_before, num_after, separator, side) for prompt in encode(rows))


def _cut(
    prompt: Tokens, limit: int, num_before: int, num_after: int, separator: npt.NDArray[np.int64], side: str
) -> Tokens:
    """The prompt with its text, or the two texts of a pair, cut to `limit` tokens at their end, or at their beginning
    if the side is "left"; the special tokens around the prompt, `num_before` and `num_after`, and the separator between
    the texts (empty if there is one text) stay."""
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
