"""Prints a benchmark's result and writes it to a file."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring.machine import describe_command


def report(name: str, command_line: Sequence[str] | None, out: Path | None, **found: Any) -> None:
    """Print the result of a benchmark as JSON, with its name and command, and write it to a file.

    Args:
        name: of the benchmark's module.
        command_line: its arguments; None: the process's own.
        out: see `write_result`; None: no file.
        found: the figures, and the machine.
    """
    given = sys.argv[1:] if command_line is None else command_line
    result = {"benchmark": name, "command": describe_command(f"benchmarks.{name}", given), **found}
    print(json.dumps(result, indent=1))
    if out is not None:
        write_result(out, result)


def write_result(file: Path, result: Mapping[str, Any]) -> None:
    """Write JSON; make the folder if needed, and replace an existing file atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(file.name + ".tmp")
    unfinished.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(unfinished, file)
