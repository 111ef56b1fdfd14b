"""Replaces the generated parts of a document, each of which is between two markers."""

from collections.abc import Iterable


def replace_generated(document: str, name: str, lines: Iterable[str]) -> str:
    """The document's text with these lines between the two markers of a part.

    Raises:
        ValueError: a marker is missing.
    """
    begin, end = f"<!-- {name}: generated -->", f"<!-- {name}: end -->"
    before, is_found, rest = document.partition(begin)
    _, is_ended, after = rest.partition(end)
    if not is_found or not is_ended:
        raise ValueError(f"the document must hold the lines {begin!r} and {end!r}")
    return f"{before}{begin}\n" + "\n".join(lines) + f"\n{end}{after}"
