"""Describes an error in a workload's file as one line, with the number of the file's line."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic
from pydantic_core import ErrorDetails

_EXPECTED = {
    "string_type": "a string",
    "tuple_type": "a list of strings",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "dataclass_type": "a table",
    "dict_type": "a table",
}
UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")
"""pydantic's types of errors for a key that a table does not have."""

_MISSING = {
    **dict.fromkeys(("key", "labels"), "a list of strings"),
    **dict.fromkeys(("prompt", "output", "questions"), "a table"),
}

FOREIGN_KEYS = {
    "labels": "labels belong to mode 'score'",
    "decoding": "decoding belongs to modes 'generate' and 'extract'",
    "max_thinking_tokens": "max_thinking_tokens belongs to thinking = 'keep' or 'drop' (modes 'generate', 'extract')",
    "questions": "questions belong to mode 'decide'",
    "question_template": "question_template belongs to mode 'decide'",
    "columns": "columns belong to mode 'extract'",
    "dimensions": "dimensions belongs to mode 'embed'",
}
"""Keys of one mode, to the message for a file of another mode that has them."""

_KEY = r"""(?:[\w-]+|"[^"]*"|'[^']*')"""
_KEYS = rf"({_KEY}(?:\s*\.\s*{_KEY})*)"
_HEADER = re.compile(rf"\s*\[\[?\s*{_KEYS}\s*\]\]?\s*(?:#.*)?")
_VALUE = re.compile(rf"\s*{_KEYS}\s*=(.*)")


def describe_fault(error: ValueError, values: Mapping[str, Any], text: str) -> str:
    """The message for an error, with the number of the line that it is about.

    Args:
        error: that reading the file raised.
        values, text: of the file.
    """
    if isinstance(error, pydantic.ValidationError):
        fault = choose_fault(error)
        steps = [str(step) for step in fault["loc"] if isinstance(step, str)]
        message = _describe(fault, values)
    else:
        message, steps = str(error), []
    line = find_line(text, [*steps, *_find_keys(message, steps, values)])
    return message if line is None else f"line {line}: {message}"


def choose_fault(error: pydantic.ValidationError) -> ErrorDetails:
    """The error to report: the first, or an unknown key, since a misspelt key is missing by its right name."""
    faults = error.errors()
    return next((fault for fault in faults if fault["type"] in UNKNOWN_KEY), faults[0])


def find_line(text: str, steps: Sequence[str]) -> int | None:
    """The number, from 1 on, of the line with a key of a TOML file; if the key is missing, of its table's line.

    Args:
        text: valid TOML.
        steps: the tables and the key in them, outermost first.
    """
    table: tuple[str, ...] = ()
    found, most, quote = None, 0, ""
    for number, line in enumerate(text.splitlines(), start=1):
        if quote:  # in a string of several lines
            quote = "" if quote in line else quote
            continue
        if header := _HEADER.fullmatch(line):
            path = table = _split_keys(header[1])
        elif value := _VALUE.fullmatch(line):
            path = (*table, *_split_keys(value[1]))
            quote = next((mark for mark in ('"""', "'''") if value[2].count(mark) % 2), "")
        else:
            continue
        if most < len(path) <= len(steps) and path == tuple(steps[: len(path)]):
            found, most = number, len(path)
    return found


def _split_keys(keys: str) -> tuple[str, ...]:
    return tuple(key.strip("\"'") for key in re.findall(_KEY, keys))


def _find_keys(message: str, steps: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """The keys that a message names below a table: at its beginning, as in ``[columns]: total: ...``, or in quotes."""
    inner: Any = values
    for step in steps:
        inner = inner.get(step) if isinstance(inner, Mapping) else None
    found = []
    words = [word for quoted, word in re.findall(r"'([^']*)'|([\w-]+)", message) for word in (quoted, word) if word]
    for word in words:
        if isinstance(inner, Mapping) and word in inner:
            found.append(word)
            inner = inner[word]
    return found


def _describe(fault: ErrorDetails, values: Mapping[str, Any]) -> str:
    """One line with table, key, what was expected, and what was found."""
    kind, context = fault["type"], fault.get("ctx", {})
    steps = [str(step) for step in fault["loc"] if isinstance(step, str)]
    if kind == "value_error" and isinstance(fault["input"], dict):  # a whole table is wrong
        return "".join(f"[{table}]: " for table in steps) + str(context["error"])
    if not steps:  # a template that is wrong since its pair was added
        return f"pair: {context['error']}"
    *tables, key = steps
    for table in tables:
        values = values[table]
    where = "".join(f"[{table}]: " for table in tables)
    if kind == "missing":
        return f"{where}{key} is missing; expected {_MISSING.get(key, 'a string')}"
    if kind in UNKNOWN_KEY:
        return f"{where}{key!r} is not a known key here"
    if kind == "value_error":
        return f"{where}{key} {context['error']}"
    if kind == "literal_error":
        expected = context["expected"]
    else:
        is_item = isinstance(fault["loc"][-1], int)
        expected = "a list of non-empty strings" if is_item else _EXPECTED[kind]
    return f"{where}{key} must be {expected}, got {values[key]!r}"
