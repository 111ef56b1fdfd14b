"""A topic of Python's own language reference, as every CPython carries it, cut to what a short prompt can hold."""

import re
from dataclasses import dataclass
from pydoc_data.topics import topics

MAX_BODY_CHARS = 1800
"""About 400 tokens: enough for five questions, little enough for a small model on two cores."""

_HEADING = re.compile(r"^[^\n]+\n[=*~^\"'+#-]+$")
_RULE = re.compile(r"^[=*-]+$")
_VERSION_NOTE = re.compile(r"^(New|Added|Changed|Deprecated) (in|since) version")
_FOOTNOTE_MARK = re.compile(r"\s\[\d+\]")
_BROKEN_HYPHEN = re.compile(r"(?<=\w-)\n(?=\w)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceTopic:
    """One document of the demo: `name` is its id, `body` whole paragraphs of readable text."""

    name: str
    title: str
    body: str


def read_reference_topic(name: str) -> ReferenceTopic | None:
    """The topic of this name, or None where this Python's reference has none.

    Its body is the beginning of the topic: whole paragraphs of at most `MAX_BODY_CHARS` characters together, the first
    one always; lines of prose joined, headings, grammars, version notes, footnotes and references left out.
    """
    if name not in topics:
        return None
    text, _, _ = topics[name].partition("-[ Footnotes ]-")
    title, _, rest = text.strip().partition("\n")
    return ReferenceTopic(name=name, title=title.strip(), body=_trim(rest.partition("\n")[2]))


def _trim(text: str) -> str:
    kept: list[str] = []
    num_chars = 0
    is_reference = False
    for paragraph in re.split(r"\n[ \t]*\n", text.strip("\n")):
        paragraph = _FOOTNOTE_MARK.sub("", paragraph).strip("\n").rstrip()
        is_indented = paragraph.startswith(" ")
        is_reference = paragraph == "See also:" or (is_reference and is_indented)
        if "::=" in paragraph:
            if kept and kept[-1].endswith(":"):
                kept[-1] = kept[-1][:-1] + "."
            continue
        if not paragraph or is_reference or _is_apparatus(paragraph.strip()):
            continue
        if not is_indented:
            paragraph = " ".join(_BROKEN_HYPHEN.sub("", paragraph).split())
        if kept and num_chars + len("\n\n") + len(paragraph) > MAX_BODY_CHARS:
            break
        num_chars += len(paragraph) + (len("\n\n") if kept else 0)
        kept.append(paragraph)
    while len(kept) > 1 and kept[-1].endswith(":"):  # announces what is no longer there
        kept.pop()
    return "\n\n".join(kept)


def _is_apparatus(paragraph: str) -> bool:
    return any(pattern.match(paragraph) for pattern in (_HEADING, _RULE, _VERSION_NOTE))
