"""Wrong options of the command line, described in one line."""

import re
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

from cyclopts import CycloptsError, MissingArgumentError, UnknownOptionError, UnusedCliTokensError
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from engine.errors import WorkloadError
from flows.command.commands import ARGUMENTS, OF_NIGHT_FILES


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


def describe_workloads(options: Mapping[str, Any]) -> Iterator[str]:
    """The faults of the workloads that a command was given, to be named with that of its model."""
    from tasks.workloads.workload import load_workload  # imported only when needed

    for name in options.get("workloads", ()):
        try:
            load_workload(name)
        except WorkloadError as error:
            yield str(error)


NUMBERS = {"int": "a whole number", "float": "a number"}

ENDS = ("--until", "--budget")
"""Options of ``batchloom nightly`` that need a night file."""


def describe_usage(error: CycloptsError, command: str, options: Collection[str]) -> str:
    """Why arguments cannot be parsed as options with values.

    Args:
        command: its name.
        options: the names of all its options, such as "database".
    """
    if isinstance(error, UnknownOptionError) and command in OF_NIGHT_FILES:
        flag = (error.token.keyword or error.token.value).partition("=")[0]
        if command == "nightly" and flag in ENDS:
            return f"{flag} needs a night file: batchloom nightly NIGHT.toml {flag} VALUE (see docs/nights.md)"
        if "file" in options:
            return (
                f"{flag} does not go with a night file, whose tables hold all settings; a workload's file is named "
                "with --workload"
            )
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        given = error.root_input_tokens or []
        files = [token for before, token in pairwise(given) if token.endswith(".toml") and before != "--workload"]
        if command in OF_NIGHT_FILES and "file" not in options and files:
            return f"a night file comes before the options: batchloom {command} {files[0]} ..."
        unnamed, shown = ARGUMENTS.get(command, ("", ""))
        is_unnamed = error.argument.field_info.name == unnamed
        if is_unnamed and command == "compare":
            return "two workloads are needed: batchloom compare OLD.toml NEW.toml"
        if not error.argument.tokens and error.keyword is None:
            near = get_close_matches(error.argument.name, error.unused_tokens or (), n=1)
            why = f"; {near[0]} is no option" if near else ""
            return f"{shown if is_unnamed else error.argument.name} is missing{why}"
    if isinstance(error, UnusedCliTokensError):
        tokens = ", ".join(error.unused_tokens or ())
        return f"{tokens}: belongs to no option (several values are given as --option A --option B)"
    line = re.sub(r"int\|Literal\[(\w+)\]", r"a whole number or \1", " ".join(str(error).split()))
    return re.sub(r" into (int|float)\.", lambda kind: f" into {NUMBERS[kind[1]]}.", line)
