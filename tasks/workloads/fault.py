"""What is wrong with a workload's file, in a line."""

from collections.abc import Mapping
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
}
_MISSING = {"key": "a list of strings", "labels": "a list of strings", "prompt": "a table", "output": "a table"}


def describe_fault(error: ValueError, values: Mapping[str, Any]) -> str:
    """What to tell of an error that reading the file's `values` raised."""
    if isinstance(error, pydantic.ValidationError):
        return _describe(error.errors()[0], values)
    return str(error)


def _describe(fault: ErrorDetails, values: Mapping[str, Any]) -> str:
    """A fault in a line: table, key, what was expected, what was found."""
    kind, context = fault["type"], fault.get("ctx", {})
    steps = [str(step) for step in fault["loc"] if isinstance(step, str)]
    if kind == "value_error" and isinstance(fault["input"], dict):  # a whole table is wrong
        return "".join(f"[{table}]: " for table in steps) + str(context["error"])
    *tables, key = steps
    for table in tables:
        values = values[table]
    where = "".join(f"[{table}]: " for table in tables)
    if kind == "missing":
        return f"{where}{key} is missing; expected {_MISSING.get(key, 'a string')}"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{where}{key!r} is not a known key here"
    if kind == "value_error":
        return f"{where}{key} {context['error']}"
    if kind == "literal_error":
        expected = context["expected"]
    else:
        is_item = isinstance(fault["loc"][-1], int)
        expected = "a list of non-empty strings" if is_item else _EXPECTED[kind]
    return f"{where}{key} must be {expected}, got {values[key]!r}"
