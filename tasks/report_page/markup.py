"""HTML and SVG that cannot be broken out of: a string is text and gets escaped, only `Markup` is markup."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

# Control characters are no part of HTML, and lone surrogates no part of UTF-8.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_VOID_TAGS = frozenset(("meta", "br", "hr"))


@dataclass(frozen=True, slots=True)
class Markup:
    """Text that is markup already. Made by `element` and `join`, and by hand for constants of this package alone."""

    text: str


Content = str | Markup
Attribute = str | int | float | None


def element(tag: str, *children: Content, **attributes: Attribute) -> Markup:
    """An element; children and values of attributes that are strings are escaped.

    An attribute that is None is left out. In the name of an attribute ``_`` stands for ``-``, and one at the end is
    dropped (``class_``). Floats keep two decimals.
    """
    names = ((name.rstrip("_").replace("_", "-"), value) for name, value in attributes.items() if value is not None)
    start = "".join([tag, *(f' {name}="{_value(value)}"' for name, value in names)])
    if tag in _VOID_TAGS:
        return Markup(f"<{start}>")
    return Markup(f"<{start}>{join(children).text}</{tag}>")


def join(children: Iterable[Content]) -> Markup:
    """Children one after the other."""
    return Markup("".join(child.text if isinstance(child, Markup) else _text(child) for child in children))


def _value(value: str | int | float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else _text(str(value))


def _text(text: str) -> str:
    return escape(_UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text))
