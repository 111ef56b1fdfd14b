"""The console script `batchloom`."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.metadata import version

from prefect import Flow

from flows.command.commands import COMMANDS, MODULES
from flows.command.failure import EXIT_USAGE, fail
from flows.command.options import HELP_FLAGS
from flows.command.prefect_server import temporary_server
from flows.command.run_flow import run_flow


def batchloom(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names; returns the exit code."""
    name, *arguments = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in COMMANDS:
        is_file = name == "nightly" and arguments[:1] != [] and arguments[0].endswith(".toml")
        needs_server = name not in ("report", "check", "advise") and not set(HELP_FLAGS) & set(arguments)
        with temporary_server() if needs_server else nullcontext():  # starts while the flow is imported
            if is_file:
                return run_flow(import_module("flows.nights.night").night, ["--file", *arguments])
            if name == "compare" and arguments[:1] != [] and not arguments[0].startswith("-"):
                arguments = ["--workload", *arguments]
            module = import_module(MODULES.get(name, f"flows.{name}"))
            flow = getattr(module, name, None)
            return run_flow(flow, arguments) if isinstance(flow, Flow) else int(module.main(arguments))
    if name == "--version":
        print(f"batchloom {version('batchloom')}")
    elif name in HELP_FLAGS:
        print("Usage: batchloom COMMAND [OPTIONS]\n")
        print("\n".join(f"  {command:9}  {meaning}" for command, meaning in COMMANDS.items()))
        print("\nbatchloom COMMAND --help shows its options, batchloom --version the version.")
    else:
        return fail(f"batchloom: no command {name!r}; there are {', '.join(COMMANDS)}", EXIT_USAGE)
    return 0
