"""The patterns by which byte-level BPE tokenizers split text into words."""

LETTER_ALTERNATIVES = {
    r" ?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
}
"""Letters, maybe with marks, maybe after one character that is no letter."""

CASED_ALTERNATIVES = {
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
}
"""Letters by case, maybe with a contraction; two of these cover all letters."""

WORD_ALTERNATIVES = {
    *LETTER_ALTERNATIVES,
    *CASED_ALTERNATIVES,
    # Contractions, case by case or not.
    *(r"'s", r"'t", r"'re", r"'ve", r"'m", r"'ll", r"'d", r"'(?:[sdmt]|ll|ve|re)", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"),
    # A mark and letters.
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
    # Digits, punctuation and white space: no letter in any.
    *(r" ?\p{N}+", r"\p{N}+", r"\p{N}", r"\p{N}{1,3}"),
    *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
    *(r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r" ?[\p{P}\p{S}]+[\r\n]*"),
    *(r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+"),
}
"""The alternatives of known word patterns."""


def is_word_pattern(pattern: str) -> bool:
    """Whether a regular expression is a known word pattern: all its alternatives are known, and they cover letters."""
    alternatives = set(_alternatives(pattern))
    covers_letters = alternatives & LETTER_ALTERNATIVES or len(alternatives & CASED_ALTERNATIVES) > 1
    return bool(covers_letters) and alternatives <= WORD_ALTERNATIVES


def _alternatives(pattern: str) -> list[str]:
    """The parts of a pattern between its outermost ``|``."""
    parts, depth, in_class, start, position = [], 0, False, 0, 0
    while position < len(pattern):
        character = pattern[position]
        if character == "\\":
            position += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "|" and depth == 0:
            parts.append(pattern[start:position])
            start = position + 1
        position += 1
    return [*parts, pattern[start:]]
