"""Wrong options of the command line, described in one line."""

from collections.abc import Iterator, Mapping

from cyclopts import CycloptsError, UnusedCliTokensError
from pydantic import ValidationError
from pydantic_core import ErrorDetails


def describe_values(error: ValidationError, meanings: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
    """The name of each option with a wrong value, and the reason; `meanings` has the options' help texts by name."""
    faults: dict[str, ErrorDetails] = {}
    for fault in error.errors():  # one for each type that a value may have: the first one tells most
        faults.setdefault(next(str(part) for part in fault["loc"] if part in meanings), fault)
    for name, fault in faults.items():
        if fault["type"] == "string_pattern_mismatch":
            yield name, f"{fault['input']!r} is not what it takes: {meanings[name]}"
        else:
            yield name, fault["msg"].removeprefix("Value error, ")


def describe_usage(error: CycloptsError) -> str:
    """Why arguments cannot be parsed as options with values."""
    if isinstance(error, UnusedCliTokensError):
        tokens = ", ".join(error.unused_tokens or ())
        return f"{tokens}: belongs to no option (several values are given as --option A --option B)"
    return " ".join(str(error).split())
